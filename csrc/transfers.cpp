// The second half of `Matching`: turns the division of the load into copies.
#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "plan.h"

namespace asyncmoe {

// Collects copies and sorts them into transfers.
struct Matching::Emitter {
    const Matching& matching;
    struct Copy {
        int64_t source, destination;
        std::array<int64_t, kCopyColumns> columns;
    };
    std::vector<Copy> copies;

    void zeros(int64_t destination, int64_t row) {
        const int64_t* to = matching.wanted_.tables[matching.wanted_.table_of[destination]][row];
        add(matching.wanted_.ranks[destination], nullptr, destination, to, region_of(to));
    }

    void overlap(int64_t source, int64_t destination, int64_t number, const Region& box) {
        const int32_t table = matching.wanted_.table_of[destination];
        const auto& [cell, row] = matching.needs_[table].overlaps[number];
        const Side& held = matching.holdings_.side();
        const int32_t from = held.table_of[source];
        const int64_t* piece = held.tables[from][matching.holdings_.row_of(cell, from)];
        add(held.ranks[source], piece, destination, matching.wanted_.tables[table][row], box);
    }

    void local(int64_t destination, int64_t number) {
        const int32_t table = matching.wanted_.table_of[destination];
        const auto& needs = matching.needs_[table];
        const int64_t source = matching.as_source_[destination];
        overlap(source, destination, number, matching.region(needs, matching.wanted_.tables[table], number));
    }

    static int64_t place(const int64_t* piece, const Region& box) {
        int64_t offset = piece[kOffset];
        for (int k = 0; k < kMaxDims; ++k) offset += (box.start[k] - piece[kStart + k]) * piece[kStrides + k];
        return offset;
    }

    void add(int64_t source, const int64_t* from, int64_t destination, const int64_t* to, const Region& box) {
        const int64_t item = matching.item_bytes_[to[kDtype]];
        const int64_t from_item = from ? matching.item_bytes_[from[kDtype]] : 0;
        Copy copy{source, matching.wanted_.ranks[destination], {}};
        auto& c = copy.columns;
        c[kFrom] = from ? from[kStorage] : -1;
        c[kTo] = to[kStorage];
        c[kFromOffset] = from ? place(from, box) * from_item : 0;
        c[kToOffset] = place(to, box) * item;
        c[kItemBytes] = item;
        for (int k = 0; k < kMaxDims; ++k) {
            c[kCopyExtents + k] = box.extent[k];
            c[kToStrides + k] = to[kStrides + k] * item;
            c[kFromStrides + k] = from ? from[kStrides + k] * from_item : 0;
        }
        c[kCopyCast] = from ? matching.cast_of(from[kDtype], to[kDtype]) : 0;
        c[kCopyTensor] = to[kTensor];
        std::copy(box.start.begin(), box.start.end(), c.begin() + kCopyStart);
        copies.push_back(copy);
    }

    // Adds the copies for the part of a demand in a holder's stretch [low, high) of the group's bytes.
    void stretch(int64_t source, const Demand& demand, int64_t low, int64_t high) {
        const int32_t number = matching.wanted_.table_of[demand.destination];
        const Needs& needs = matching.needs_[number];
        const Run& run = needs.runs[demand.run];
        const int64_t shift = demand.begin - needs.begin[run.first];
        low = std::max(low - shift, needs.begin[run.first]);
        high = std::min(high - shift, needs.begin[run.last]);
        if (low >= high) return;
        const auto first =
            std::upper_bound(needs.begin.begin() + run.first, needs.begin.begin() + run.last + 1, low) - 1;
        for (int64_t i = first - needs.begin.begin(); i < run.last && needs.begin[i] < high; ++i) {
            Region box = matching.region(needs, matching.wanted_.tables[number], i);
            const int64_t begin = needs.begin[i], end = needs.begin[i + 1];
            const int64_t from = std::max(begin, low), to = std::min(end, high);
            if (from != begin || to != end) {
                const int axis = cut_axis(box);
                const int64_t unit = (end - begin) / box.extent[axis];
                box.start[axis] += (from - begin) / unit;
                box.extent[axis] = (to - from) / unit;
            }
            overlap(source, demand.destination, i, box);
        }
    }

    Transfers sorted() {
        std::vector<int64_t> order(copies.size());
        std::iota(order.begin(), order.end(), 0);
        const auto key = [this](int64_t i) {
            const Copy& copy = copies[i];
            return std::make_tuple(copy.source, copy.destination, copy.columns[kTo], copy.columns[kToOffset]);
        };
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
        Transfers made;
        made.copies.reserve(copies.size() * kCopyColumns);
        for (size_t i = 0; i < order.size(); ++i) {
            Copy& copy = copies[order[i]];
            if (made.pairs.empty() || made.pairs.back().source != copy.source ||
                made.pairs.back().destination != copy.destination)
                made.pairs.push_back({copy.source, copy.destination, 0, 0});
            auto& pair = made.pairs.back();
            if (copy.source != copy.destination) {
                copy.columns[kWireOffset] = pair.nbytes;
                int64_t nbytes = copy.columns[kItemBytes];
                for (int k = 0; k < kMaxDims; ++k) nbytes *= copy.columns[kCopyExtents + k];
                pair.nbytes += nbytes;
            }
            made.copies.insert(made.copies.end(), copy.columns.begin(), copy.columns.end());
            pair.last = static_cast<int64_t>(i) + 1;
        }
        return made;
    }
};

Transfers Matching::part(const std::vector<int64_t>& ranks) const {
    std::vector<char> chosen(wanted_.ranks.size(), 0), sending(holdings_.side().ranks.size(), 0);
    for (int64_t rank : ranks) {
        const int64_t destination = wanted_.find(rank), source = holdings_.side().find(rank);
        if (destination >= 0) chosen[destination] = 1;
        if (source >= 0) sending[source] = 1;
    }
    Emitter emitter{*this, {}};
    for (size_t d = 0; d < chosen.size(); ++d) {
        if (!chosen[d]) continue;
        const auto destination = static_cast<int64_t>(d);
        const Table table = wanted_.tables[wanted_.table_of[d]];
        const Needs& needs = needs_[wanted_.table_of[d]];
        for (const Run& run : needs.runs)
            if (holds(run.group, destination))
                for (int64_t i = run.first; i < run.last; ++i) emitter.local(destination, i);
        for (int64_t row = 0; row < table.count; ++row)
            if (table[row][kTensor] == kPadding) emitter.zeros(destination, row);
    }
    for (size_t g = 0; g < sharing_.size(); ++g) {
        const Share& share = sharing_[g];
        const auto& holders = holdings_.groups()[g].holders;
        for (size_t i = 0; i < share.demands.size(); ++i) {
            const Demand& demand = share.demands[i];
            const Needs& needs = needs_[wanted_.table_of[demand.destination]];
            const Run& run = needs.runs[demand.run];
            const int64_t end = demand.begin + needs.begin[run.last] - needs.begin[run.first];
            size_t k = std::upper_bound(share.ends.begin(), share.ends.end(), demand.begin) - share.ends.begin();
            for (; k < holders.size(); ++k) {
                const int64_t low = k ? share.ends[k - 1] : 0;
                if (low >= end) break;
                if (chosen[demand.destination] || sending[holders[k]])
                    emitter.stretch(holders[k], demand, low, share.ends[k]);
            }
        }
    }
    return emitter.sorted();
}

std::vector<Matching::Traffic> Matching::traffic() const {
    std::vector<Traffic> found;
    for (size_t g = 0; g < sharing_.size(); ++g) {
        const Share& share = sharing_[g];
        const auto& holders = holdings_.groups()[g].holders;
        for (const Demand& demand : share.demands) {
            const Needs& needs = needs_[wanted_.table_of[demand.destination]];
            const Run& run = needs.runs[demand.run];
            const int64_t end = demand.begin + needs.begin[run.last] - needs.begin[run.first];
            size_t k = std::upper_bound(share.ends.begin(), share.ends.end(), demand.begin) - share.ends.begin();
            for (; k < holders.size(); ++k) {
                const int64_t low = std::max(demand.begin, k ? share.ends[k - 1] : 0);
                if (low >= end) break;
                const int64_t nbytes = std::min(end, share.ends[k]) - low;
                if (nbytes > 0)
                    found.push_back({holdings_.side().ranks[holders[k]], wanted_.ranks[demand.destination], nbytes});
            }
        }
    }
    return found;
}

}  // namespace asyncmoe
