#include "plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace asyncmoe {

namespace {

// Pieces of fewer bytes are not cut to balance the load.
constexpr int64_t kSmallestCut = 1 << 15;
constexpr int kSweeps = 64;

// Adds `amount` to the loads of `holders` so that the lowest loads rise to a common level; x is each holder's addition.
void pour(int64_t amount, const std::vector<int32_t>& holders, std::vector<int64_t>& load, std::vector<int64_t>& x) {
    std::vector<int32_t> order(holders.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return std::make_pair(load[holders[a]], a) < std::make_pair(load[holders[b]], b);
    });
    int64_t total = amount;
    size_t below = 0;
    while (below < order.size() && total >= static_cast<int64_t>(below) * load[holders[order[below]]])
        total += load[holders[order[below++]]];
    const int64_t level = total / static_cast<int64_t>(below), rest = total % static_cast<int64_t>(below);
    std::fill(x.begin(), x.end(), 0);
    for (size_t i = 0; i < below; ++i) {
        const int64_t target = level + (static_cast<int64_t>(i) < rest);
        x[order[i]] = target - load[holders[order[i]]];
        load[holders[order[i]]] = target;
    }
}

}  // namespace

Matching::Matching(const Holdings& holdings, Side wanted, std::vector<int64_t> item_bytes, std::vector<DtypeCast> casts)
    : holdings_(holdings), wanted_(std::move(wanted)), item_bytes_(std::move(item_bytes)), casts_(std::move(casts)) {
    needs_.resize(wanted_.tables.size());
    for (size_t t = 0; t < needs_.size() && !fault_; ++t) find_needs(static_cast<int32_t>(t));
    if (fault_) return;
    for (int64_t rank : wanted_.ranks) as_source_.push_back(holdings_.side().find(rank));
    gather_demands();
    divide();
}

int64_t Matching::cast_of(int64_t from, int64_t to) const {
    if (from == to) return 0;
    for (const auto& known : casts_)
        if (known.from == from && known.to == to) return known.cast;
    return -1;
}

void Matching::find_needs(int32_t number) {
    const Table table = wanted_.tables[number];
    struct Found {
        Overlap overlap;
        int64_t nbytes;
    };
    std::vector<Found> found;
    std::map<int32_t, int64_t> count;
    for (int64_t row = 0; row < table.count; ++row) {
        const int64_t* piece = table[row];
        if (piece[kTensor] == kPadding) continue;
        const Region wanted = region_of(piece);
        int64_t missing = wanted.size();
        const int64_t item = item_bytes_[piece[kDtype]];
        holdings_.overlaps(piece[kTensor], wanted, [&](int64_t cell, const Region& overlap) {
            missing -= overlap.size();
            found.push_back({{cell, row}, overlap.size() * item});
            ++count[holdings_.cell(cell).group];
            for (int64_t h = holdings_.cell(cell).first_holder; h < holdings_.last_holder(cell) && !fault_; ++h) {
                const auto& holder = holdings_.holders()[h];
                const int64_t held = holdings_.side().tables[holder.table][holder.row][kDtype];
                if (cast_of(held, piece[kDtype]) < 0) fault_ = Fault{true, number, row, holder.table, holder.row};
            }
        });
        if (missing != 0 && !fault_) fault_ = Fault{false, number, row, -1, -1};
        if (fault_) return;
    }
    Needs& needs = needs_[number];
    std::map<int32_t, int64_t> next;
    int64_t at = 0;
    for (const auto& [group, n] : count) {
        next[group] = at;
        needs.runs.push_back({group, at, at + n});
        at += n;
    }
    needs.overlaps.resize(found.size());
    needs.begin.assign(found.size() + 1, 0);
    for (const Found& f : found) {
        const int64_t place = next[holdings_.cell(f.overlap.cell).group]++;
        needs.overlaps[place] = f.overlap;
        needs.begin[place + 1] = f.nbytes;
    }
    std::partial_sum(needs.begin.begin(), needs.begin.end(), needs.begin.begin());
}

bool Matching::holds(int32_t group, int64_t destination) const {
    const int64_t source = as_source_[destination];
    if (source < 0) return false;
    const auto& tables = holdings_.groups()[group].tables;
    return std::binary_search(tables.begin(), tables.end(), holdings_.side().table_of[source]);
}

void Matching::gather_demands() {
    sharing_.resize(holdings_.groups().size());
    std::vector<int64_t> total(sharing_.size(), 0);
    for (size_t d = 0; d < wanted_.ranks.size(); ++d) {
        const Needs& needs = needs_[wanted_.table_of[d]];
        for (size_t r = 0; r < needs.runs.size(); ++r) {
            const Run& run = needs.runs[r];
            if (holds(run.group, static_cast<int64_t>(d))) continue;
            sharing_[run.group].demands.push_back({static_cast<int64_t>(d), static_cast<int32_t>(r), total[run.group]});
            total[run.group] += needs.begin[run.last] - needs.begin[run.first];
        }
    }
    for (size_t g = 0; g < sharing_.size(); ++g) sharing_[g].ends.push_back(total[g]);
}

void Matching::divide() {
    const auto& groups = holdings_.groups();
    std::vector<int64_t> total(groups.size()), order;
    std::vector<std::vector<int64_t>> x(groups.size());
    for (size_t g = 0; g < groups.size(); ++g) {
        total[g] = sharing_[g].ends[0];
        x[g].assign(groups[g].holders.size(), 0);
        if (total[g] > 0) order.push_back(static_cast<int64_t>(g));
    }
    // Divide the groups with the fewest holders first; then repeatedly divide each group again, with the others'
    // division fixed. This lowers the sum of the squared loads to its minimum, where the greatest load is minimal, too.
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return groups[a].holders.size() < groups[b].holders.size(); });
    shares_.assign(holdings_.side().ranks.size(), 0);
    bool changed = true;
    for (int sweep = 0; sweep < kSweeps && changed; ++sweep) {
        changed = false;
        for (int64_t g : order) {
            const auto& holders = groups[g].holders;
            std::vector<int64_t> before = x[g];
            for (size_t i = 0; i < holders.size(); ++i) shares_[holders[i]] -= x[g][i];
            pour(total[g], holders, shares_, x[g]);
            changed |= x[g] != before;
        }
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        auto& ends = sharing_[g].ends;
        ends.resize(x[g].size());
        int64_t at = 0;
        for (size_t i = 0; i < x[g].size(); ++i) at += x[g][i], ends[i] = rounded(sharing_[g], at);
    }
}

Region Matching::region(const Needs& needs, Table table, int64_t overlap) const {
    const auto& [cell, row] = needs.overlaps[overlap];
    return intersection(holdings_.cell(cell).region, region_of(table[row]));
}

int cut_axis(const Region& region) {
    int axis = 0;
    while (axis + 1 < kMaxDims && region.extent[axis] == 1) ++axis;
    return axis;
}

// Among the positions of a group where a stretch may end, the one nearest to byte `at`.
int64_t Matching::rounded(const Share& share, int64_t at) const {
    if (at == 0 || share.demands.empty()) return at;
    const auto after = std::upper_bound(share.demands.begin(), share.demands.end(), at,
                                        [](int64_t place, const Demand& d) { return place < d.begin; });
    const Demand& demand = *(after - 1);
    const int32_t number = wanted_.table_of[demand.destination];
    const Needs& needs = needs_[number];
    const Run& run = needs.runs[demand.run];
    const int64_t shift = demand.begin - needs.begin[run.first];
    if (at - shift >= needs.begin[run.last]) return at;
    const auto next = std::upper_bound(needs.begin.begin() + run.first, needs.begin.begin() + run.last + 1, at - shift);
    const int64_t overlap = next - needs.begin.begin() - 1;
    const int64_t begin = needs.begin[overlap] + shift, nbytes = needs.begin[overlap + 1] - needs.begin[overlap];
    const Region box = region(needs, wanted_.tables[number], overlap);
    const int64_t unit = nbytes < kSmallestCut ? nbytes : nbytes / box.extent[cut_axis(box)];
    return begin + (at - begin + unit / 2) / unit * unit;
}

}  // namespace asyncmoe
