#include "delta_places.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <string>

namespace asyncmoe {
namespace {

int64_t reach_of(const int64_t* piece) {
    int64_t last = piece[kOffset];
    for (int k = 0; k < kMaxDims; ++k) last += (piece[kExtent + k] - 1) * piece[kStrides + k];
    return last;
}

// Finds coordinates whose strides add up to `rest`, in the dimensions order[level ..]; `span` is the most that these
// can add up to.
bool decompose(const int64_t* piece, const std::array<int, kMaxDims>& order, int level, int64_t rest, int64_t span,
               Coordinates& found) {
    if (level == kMaxDims) return rest == 0;
    const int k = order[static_cast<size_t>(level)];
    const int64_t extent = piece[kExtent + k], stride = piece[kStrides + k];
    auto& along = found[static_cast<size_t>(k)];
    along = 0;
    if (extent == 1 || stride == 0) return decompose(piece, order, level + 1, rest, span, found);
    const int64_t inner = span - (extent - 1) * stride;
    for (along = std::min(rest / stride, extent - 1); along >= 0 && rest - along * stride <= inner; --along)
        if (decompose(piece, order, level + 1, rest - along * stride, inner, found)) return true;
    return false;
}

bool holds(const int64_t* piece, int64_t offset, Coordinates& found) {
    std::array<int, kMaxDims> order;
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return piece[kStrides + a] > piece[kStrides + b]; });
    return decompose(piece, order, 0, offset - piece[kOffset], reach_of(piece) - piece[kOffset], found);
}

}  // namespace

std::vector<int64_t> elements_at(Table pieces, const int64_t* places, int64_t count) {
    std::vector<int64_t> order(static_cast<size_t>(pieces.count));
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int64_t i) { return std::make_pair(pieces[i][kStorage], pieces[i][kOffset]); };
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
    std::vector<int64_t> reach(order.size());  // the furthest offset of this piece and those before it in the storage
    for (size_t i = 0; i < order.size(); ++i) {
        const bool same = i > 0 && pieces[order[i - 1]][kStorage] == pieces[order[i]][kStorage];
        reach[i] = std::max(same ? reach[i - 1] : -1, reach_of(pieces[order[i]]));
    }
    std::vector<int64_t> made;
    made.reserve(static_cast<size_t>(count * kElementColumns));
    for (int64_t q = 0; q < count; ++q) {
        const int64_t storage = places[q * kPlaceColumns], offset = places[q * kPlaceColumns + 1];
        auto at = std::upper_bound(order.begin(), order.end(), std::make_pair(storage, offset),
                                   [&](const auto& place, int64_t i) { return place < key(i); }) -
                  order.begin();
        Coordinates found{};
        bool held = false;
        while (!held && at > 0) {
            const int64_t* piece = pieces[order[static_cast<size_t>(--at)]];
            if (piece[kStorage] != storage || reach[static_cast<size_t>(at)] < offset) break;
            held = holds(piece, offset, found);
            if (!held) continue;
            made.push_back(piece[kTensor]);
            for (int k = 0; k < kMaxDims; ++k) made.push_back(piece[kStart + k] + found[static_cast<size_t>(k)]);
        }
        if (!held)
            throw std::invalid_argument("element " + std::to_string(offset) + " of storage " + std::to_string(storage) +
                                        ": got no piece that holds it, expected one");
    }
    return made;
}

}  // namespace asyncmoe
