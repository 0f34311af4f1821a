// Which element of which tensor lies at a place of a rank's storages.
#pragma once

#include <cstdint>
#include <vector>

#include "pieces.h"

namespace asyncmoe {

// Columns of a query, int64: the number of the storage, an offset in its elements.
constexpr int64_t kPlaceColumns = 2;
// Columns of an answer, int64: the number of the tensor (or kPadding), the coordinates of the element in it.
constexpr int64_t kElementColumns = 1 + kMaxDims;

// Returns int64[count, kElementColumns]. The pieces of a storage must hold each of its elements at most once. Throws
// std::invalid_argument for a place that no piece holds.
std::vector<int64_t> elements_at(Table pieces, const int64_t* places, int64_t count);

}  // namespace asyncmoe
