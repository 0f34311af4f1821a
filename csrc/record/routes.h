// Expert ids of mixture-of-experts layers, bit-packed.
//
// Layer-major: each layer has a plane of ceil(rows * top_k * bits / 8) bytes, in which the ids follow each other token
// by token in the order the router chose them. So the planes of consecutive layers are consecutive bytes: a pipeline
// stage fetches those and no others, and unpacks each into the [rows, top_k] its layer asks for.
#pragma once

#include <cstdint>

namespace asyncmoe::record {

constexpr int64_t kMaxTopK = 256;

struct RouteShape {
    int64_t rows;  // tokens
    int64_t top_k;
    int bits;         // of an id, 1 to 16
    int64_t experts;  // ids are smaller; at most 1 << bits

    int64_t ids() const { return rows * top_k; }  // of a layer
    int64_t plane_bytes() const { return (ids() * bits + 7) / 8; }
};

// Packs layers[0 .. count) of routes, [rows, all_layers, top_k], into as many planes.
// Returns -1, or where in `routes` an id is that is negative or not smaller than `experts`, or that its token has named
// in the same layer before.
int64_t pack_routes(const int32_t* routes, const RouteShape& shape, int64_t all_layers, const int64_t* layers,
                    int64_t count, uint8_t* planes);

// Unpacks `count` planes into ids[count, rows, top_k] of one byte each (bits <= 8 only) or two.
// Returns -1, or where in `ids` an id is that is not smaller than `experts` or that its token has named in the same
// layer before; count * rows * top_k when bits after the last id of a plane are set.
template <typename Id>
int64_t unpack_routes(const uint8_t* planes, const RouteShape& shape, int64_t count, Id* ids);

}  // namespace asyncmoe::record
