#include "plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "digest.h"

namespace asyncmoe {

namespace {

// Bytes; smaller pieces are not cut to balance the load.
constexpr int64_t kSmallestCut = 1 << 15;
constexpr int kSweeps = 64;

using Wide = __int128;  // sums of products of any two int64

Region region_of(const int64_t* row) {
    Region region;
    std::copy_n(row + kStart, kMaxDims, region.start.begin());
    std::copy_n(row + kExtent, kMaxDims, region.extent.begin());
    return region;
}

bool meet(const Region& a, const Region& b) {
    for (int k = 0; k < kMaxDims; ++k)
        if (a.start[k] >= b.start[k] + b.extent[k] || b.start[k] >= a.start[k] + a.extent[k]) return false;
    return true;
}

Region intersection(const Region& a, const Region& b) {
    Region found;
    for (int k = 0; k < kMaxDims; ++k) {
        found.start[k] = std::max(a.start[k], b.start[k]);
        found.extent[k] = std::min(a.start[k] + a.extent[k], b.start[k] + b.extent[k]) - found.start[k];
    }
    return found;
}

// The dimension along which boxes begin at the most places: sorted along it, few have to be compared.
int busiest_axis(const std::vector<Region>& boxes) {
    int best = 0;
    size_t most = 0;
    std::vector<int64_t> starts(boxes.size());
    for (int k = 0; k < kMaxDims; ++k) {
        for (size_t i = 0; i < boxes.size(); ++i) starts[i] = boxes[i].start[k];
        std::sort(starts.begin(), starts.end());
        const size_t places = std::unique(starts.begin(), starts.end()) - starts.begin();
        if (places > most) most = places, best = k;
    }
    return best;
}

void sort_along(std::vector<Region>& boxes, int axis) {
    std::sort(boxes.begin(), boxes.end(), [axis](const Region& a, const Region& b) {
        return a.start[axis] != b.start[axis] ? a.start[axis] < b.start[axis] : a < b;
    });
}

// Boxes sorted along `axis`.
bool any_meet(const std::vector<Region>& boxes, int axis) {
    for (size_t i = 0; i < boxes.size(); ++i) {
        const int64_t end = boxes[i].start[axis] + boxes[i].extent[axis];
        for (size_t j = i + 1; j < boxes.size() && boxes[j].start[axis] < end; ++j)
            if (meet(boxes[i], boxes[j])) return true;
    }
    return false;
}

Coordinates row_major(const Coordinates& shape) {
    Coordinates steps;
    int64_t step = 1;
    for (int k = kMaxDims - 1; k >= 0; --k) steps[k] = step, step *= shape[k];
    return steps;
}

// Places `extent[i]` elements `stride[i]` apart, from an offset, as a box of a storage's shape.
std::optional<Region> box_of_runs(const Coordinates& shape, int64_t offset, const int64_t* extents,
                                  const int64_t* strides, int count) {
    const Coordinates steps = row_major(shape);
    Region box;
    for (int k = 0; k < kMaxDims; ++k) box.start[k] = offset / steps[k] % shape[k], box.extent[k] = 1;
    for (int i = 0; i < count; ++i) {
        if (extents[i] == 1) continue;
        int axis = 0;
        while (axis < kMaxDims && (steps[axis] != strides[i] || shape[axis] == 1)) ++axis;
        if (axis == kMaxDims || box.extent[axis] != 1 || box.start[axis] + extents[i] > shape[axis])
            return std::nullopt;
        box.extent[axis] = extents[i];
    }
    return box;
}

std::optional<Region> box_in_storage(const int64_t* row, const Coordinates& shape) {
    if (auto box = box_of_runs(shape, row[kOffset], row + kExtent, row + kStrides, kMaxDims)) return box;
    const Region region = region_of(row);
    const Coordinates steps = row_major(region.extent);
    for (int k = 0; k < kMaxDims; ++k)
        if (region.extent[k] > 1 && steps[k] != row[kStrides + k]) return std::nullopt;
    const int64_t size = region.size(), one = 1;
    return box_of_runs(shape, row[kOffset], &size, &one, 1);
}

// Adds `amount` to the loads of some ranks so that the lowest rise to a common level; x is what each of them gets.
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

int64_t Region::size() const {
    int64_t n = 1;
    for (int64_t e : extent) n *= e;
    return n;
}

int64_t Side::find(int64_t rank) const {
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
    return at != ranks.end() && *at == rank ? at - ranks.begin() : -1;
}

std::optional<BadRow> find_bad_row(Table table, const int64_t* extents, const int64_t* elements) {
    std::optional<BadRow> outside;
    for (int64_t i = 0; i < table.count; ++i) {
        const int64_t* row = table[i];
        Wide last = row[kOffset];
        bool stored = row[kOffset] >= 0, inside = true;
        for (int k = 0; k < kMaxDims; ++k) {
            const int64_t start = row[kStart + k], extent = row[kExtent + k], stride = row[kStrides + k];
            inside &= start >= 0 && extent >= 1;
            if (row[kTensor] != kPadding)
                inside &= static_cast<Wide>(start) + extent <= extents[row[kTensor] * kMaxDims + k];
            stored &= stride >= 0;
            last += static_cast<Wide>(extent - 1) * stride;
        }
        if (!inside) return BadRow{i, false};
        if (!outside && !(stored && last < elements[row[kStorage]])) outside = BadRow{i, true};
    }
    return outside;
}

std::vector<int64_t> doubtful_storages(Table table, const int64_t* shapes, int64_t storages) {
    std::vector<int64_t> first(storages + 1, 0), order(table.count);
    for (int64_t i = 0; i < table.count; ++i) ++first[table[i][kStorage] + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < table.count; ++i) order[next[table[i][kStorage]]++] = i;
    std::vector<int64_t> found;
    std::vector<Region> boxes;
    for (int64_t s = 0; s < storages; ++s) {
        Coordinates shape;
        std::copy_n(shapes + s * kMaxDims, kMaxDims, shape.begin());
        Wide missing = Region{{}, shape}.size();
        if (missing == 0 && first[s] == first[s + 1]) continue;
        boxes.clear();
        bool known = missing > 0;
        for (int64_t i = first[s]; i < first[s + 1] && known; ++i) {
            const auto box = box_in_storage(table[order[i]], shape);
            known = box.has_value();
            if (known) boxes.push_back(*box), missing -= box->size();
        }
        if (known && missing == 0 && boxes.size() > 1) {
            const int axis = busiest_axis(boxes);
            sort_along(boxes, axis);
            known = !any_meet(boxes, axis);
        }
        if (!known || missing != 0) found.push_back(s);
    }
    return found;
}

// ---------------------------------------------------------------- what the sources hold

Holdings::Holdings(Side side, int64_t tensors) : side_(std::move(side)), first_{0} {
    std::vector<int64_t> begin(tensors + 1, 0);
    for (const Table& table : side_.tables)
        for (int64_t i = 0; i < table.count; ++i)
            if (table[i][kTensor] != kPadding) ++begin[table[i][kTensor] + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<Holder> sorted(begin.back());
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (size_t t = 0; t < side_.tables.size(); ++t)
        for (int64_t i = 0; i < side_.tables[t].count; ++i) {
            const int64_t tensor = side_.tables[t][i][kTensor];
            if (tensor != kPadding) sorted[next[tensor]++] = {static_cast<int32_t>(t), static_cast<int32_t>(i)};
        }
    std::vector<Holder> held;
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
        held.assign(sorted.begin() + begin[tensor], sorted.begin() + begin[tensor + 1]);
        add_tensor(held);
        first_.push_back(static_cast<int64_t>(cells_.size()));
    }
    cells_.push_back({{}, 0, static_cast<int64_t>(holders_.size())});
    number_groups();
}

void Holdings::add_tensor(std::vector<Holder>& held) {
    const auto region = [this](const Holder& holder) { return region_of(side_.tables[holder.table][holder.row]); };
    std::vector<Region> boxes;
    for (const Holder& holder : held) boxes.push_back(region(holder));
    std::sort(boxes.begin(), boxes.end());
    boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
    const int axis = boxes.size() > 1 ? busiest_axis(boxes) : 0;
    const size_t first = cells_.size();
    sort_along(boxes, axis);
    if (any_meet(boxes, axis)) {
        add_grid(boxes, held, axis);
    } else {
        std::stable_sort(held.begin(), held.end(), [&](const Holder& a, const Holder& b) {
            const Region left = region(a), right = region(b);
            return std::tie(left.start[axis], left) < std::tie(right.start[axis], right);
        });
        size_t from = 0;
        for (const Region& box : boxes) {
            size_t to = from;
            while (to < held.size() && region(held[to]) == box) ++to;
            add_cell(box, held.data() + from, held.data() + to);
            from = to;
        }
    }
    axis_.push_back(static_cast<int8_t>(axis));
    int64_t reach = 0;
    for (size_t i = first; i < cells_.size(); ++i) {
        reach = std::max(reach, cells_[i].region.start[axis] + cells_[i].region.extent[axis]);
        reach_.push_back(reach);
    }
}

void Holdings::add_grid(const std::vector<Region>& boxes, const std::vector<Holder>& held, int axis) {
    std::array<std::vector<int64_t>, kMaxDims> edges;
    int64_t count = 1;
    for (int k = 0; k < kMaxDims; ++k) {
        for (const Region& box : boxes) {
            edges[k].push_back(box.start[k]);
            edges[k].push_back(box.start[k] + box.extent[k]);
        }
        std::sort(edges[k].begin(), edges[k].end());
        edges[k].erase(std::unique(edges[k].begin(), edges[k].end()), edges[k].end());
        count *= static_cast<int64_t>(edges[k].size()) - 1;
        if (count > kMostCells) throw std::length_error("boxes of one tensor overlap in too many ways");
    }
    std::vector<std::vector<Holder>> inside(count);
    for (const Holder& holder : held) {
        const Region box = region_of(side_.tables[holder.table][holder.row]);
        std::array<int64_t, kMaxDims> low, high, at;
        for (int k = 0; k < kMaxDims; ++k) {
            const auto place = [&](int64_t edge) {
                return std::lower_bound(edges[k].begin(), edges[k].end(), edge) - edges[k].begin();
            };
            low[k] = at[k] = place(box.start[k]);
            high[k] = place(box.start[k] + box.extent[k]);
        }
        for (int k = 0; k >= 0;) {
            int64_t number = 0;
            for (int j = 0; j < kMaxDims; ++j) number = number * (static_cast<int64_t>(edges[j].size()) - 1) + at[j];
            inside[number].push_back(holder);
            for (k = kMaxDims - 1; k >= 0 && ++at[k] == high[k]; --k) at[k] = low[k];
        }
    }
    std::vector<std::pair<Region, int64_t>> filled;
    for (int64_t number = 0; number < count; ++number) {
        if (inside[number].empty()) continue;
        Region region;
        int64_t rest = number;
        for (int k = kMaxDims - 1; k >= 0; --k) {
            const int64_t cells = static_cast<int64_t>(edges[k].size()) - 1, i = rest % cells;
            rest /= cells;
            region.start[k] = edges[k][i];
            region.extent[k] = edges[k][i + 1] - edges[k][i];
        }
        filled.emplace_back(region, number);
    }
    std::stable_sort(filled.begin(), filled.end(),
                     [axis](const auto& a, const auto& b) { return a.first.start[axis] < b.first.start[axis]; });
    for (const auto& [region, number] : filled)
        add_cell(region, inside[number].data(), inside[number].data() + inside[number].size());
}

void Holdings::add_cell(const Region& region, const Holder* first, const Holder* last) {
    cells_.push_back({region, 0, static_cast<int64_t>(holders_.size())});
    holders_.insert(holders_.end(), first, last);
}

void Holdings::number_groups() {
    std::vector<std::vector<int32_t>> ranks_of(side_.tables.size());
    for (size_t i = 0; i < side_.ranks.size(); ++i) ranks_of[side_.table_of[i]].push_back(static_cast<int32_t>(i));
    std::map<std::vector<int32_t>, int32_t> number;
    std::vector<int32_t> tables;
    for (size_t c = 0; c + 1 < cells_.size(); ++c) {
        tables.clear();
        for (int64_t h = cells_[c].first_holder; h < cells_[c + 1].first_holder; ++h)
            if (tables.empty() || tables.back() != holders_[h].table) tables.push_back(holders_[h].table);
        const auto [at, fresh] = number.try_emplace(tables, static_cast<int32_t>(groups_.size()));
        cells_[c].group = at->second;
        if (!fresh) continue;
        Group group{tables, {}};
        for (int32_t table : tables)
            group.holders.insert(group.holders.end(), ranks_of[table].begin(), ranks_of[table].end());
        std::sort(group.holders.begin(), group.holders.end());
        groups_.push_back(std::move(group));
    }
}

int32_t Holdings::row_of(int64_t cell, int32_t table) const {
    const auto first = holders_.begin() + cells_[cell].first_holder, last = holders_.begin() + last_holder(cell);
    return std::lower_bound(first, last, table, [](const Holder& h, int32_t t) { return h.table < t; })->row;
}

template <typename Visit>
void Holdings::overlaps(int64_t tensor, const Region& wanted, Visit&& visit) const {
    const auto [first, last] = cells_of(tensor);
    const int axis = axis_[tensor];
    const int64_t end = wanted.start[axis] + wanted.extent[axis];
    int64_t i = std::upper_bound(reach_.begin() + first, reach_.begin() + last, wanted.start[axis]) - reach_.begin();
    for (; i < last && cells_[i].region.start[axis] < end; ++i)
        if (meet(cells_[i].region, wanted)) visit(i, intersection(cells_[i].region, wanted));
}

// ---------------------------------------------------------------- who sends what

Matching::Matching(const Holdings& holdings, Side wanted, std::vector<int64_t> item_bytes, CastPair cast, bool in_place)
    : holdings_(holdings),
      wanted_(std::move(wanted)),
      item_bytes_(std::move(item_bytes)),
      cast_(cast),
      in_place_(in_place) {
    needs_.resize(wanted_.tables.size());
    for (size_t t = 0; t < needs_.size() && !fault_; ++t) find_needs(static_cast<int32_t>(t));
    if (fault_) return;
    for (int64_t rank : wanted_.ranks) as_source_.push_back(holdings_.side().find(rank));
    gather_demands();
    divide();
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
                if (held != piece[kDtype] && !(held == cast_.from && piece[kDtype] == cast_.to))
                    fault_ = Fault{true, number, row, holder.table, holder.row};
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
    // The least flexible first; then over and over each group anew, given the others: that lowers the sum of the
    // squared loads until it is minimal, where the greatest load is minimal too.
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

namespace {

// The dimension along which a region is cut.
int cut_axis(const Region& region) {
    int axis = 0;
    while (axis + 1 < kMaxDims && region.extent[axis] == 1) ++axis;
    return axis;
}

}  // namespace

// The place nearest to byte `at` of a group where a stretch may end.
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

// Collects copies, and sorts them into transfers.
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
        const Region box = matching.region(needs, matching.wanted_.tables[table], number);
        if (!matching.in_place_ || !in_place(source, table, number, box)) overlap(source, destination, number, box);
    }

    // Whether the rank has the overlap where it wants it.
    bool in_place(int64_t source, int32_t table, int64_t number, const Region& box) const {
        const auto& [cell, row] = matching.needs_[table].overlaps[number];
        const int64_t* to = matching.wanted_.tables[table][row];
        const Side& held = matching.holdings_.side();
        const int32_t own = held.table_of[source];
        for (int64_t h = matching.holdings_.cell(cell).first_holder; h < matching.holdings_.last_holder(cell); ++h) {
            const auto& holder = matching.holdings_.holders()[h];
            const int64_t* from = held.tables[holder.table][holder.row];
            if (holder.table == own && from[kStorage] == to[kStorage] && place(from, box) == place(to, box))
                return true;
        }
        return false;
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
        c[kCopyCast] = from && from[kDtype] != to[kDtype];
        copies.push_back(copy);
    }

    // The part of a demand that a holder's stretch [low, high) of the group's bytes covers.
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
        int64_t first = 0;
        for (size_t i = 0; i < order.size(); ++i) {
            Copy& copy = copies[order[i]];
            if (made.pairs.empty() || made.pairs.back().source != copy.source ||
                made.pairs.back().destination != copy.destination)
                made.pairs.push_back({copy.source, copy.destination, 0, 0, 0});
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
        for (auto& pair : made.pairs) {
            const auto* data = reinterpret_cast<const std::byte*>(made.copies.data() + first * kCopyColumns);
            pair.check = digest(data, (pair.last - first) * kCopyColumns * static_cast<int64_t>(sizeof(int64_t)), 1);
            first = pair.last;
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
        for (int64_t row = 0; row < table.count && !in_place_; ++row)
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
