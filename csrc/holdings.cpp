#include "holdings.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

namespace asyncmoe {

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
        if (count > kMostCells)
            throw std::length_error("overlapping boxes of one tensor: got more than " + std::to_string(kMostCells) +
                                    " cells, expected at most that many");
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

}  // namespace asyncmoe
