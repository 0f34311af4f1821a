// Expert ids of mixture-of-experts layers, bit-packed.
//
// Layer-major: each layer has a plane of ceil(rows * top_k * bits / 8) bytes with the ids token by token, in the order
// in which the router chose them. The planes of consecutive layers are therefore consecutive bytes: a pipeline stage
// fetches only its own planes and unpacks each into the [rows, top_k] array that its layer needs.
#pragma once

#include <cstdint>

namespace asyncmoe::trajectory {

constexpr int64_t kMaxTopK = 256;

struct RouteShape {
    int64_t rows;  // tokens
    int64_t top_k;
    int bits;         // per id, 1 to 16
    int64_t experts;  // exclusive upper bound of the ids; at most 1 << bits

    int64_t ids() const { return rows * top_k; }  // per layer
    int64_t plane_bytes() const { return (ids() * bits + 7) / 8; }
};

// Packs layers[0 .. count) of routes, [rows, all_layers, top_k], into `count` planes.
// Returns -1, or the position in `routes` of an id that is negative, not smaller than `experts`, or a repetition within
// its token and layer.
int64_t pack_routes(const int32_t* routes, const RouteShape& shape, int64_t all_layers, const int64_t* layers,
                    int64_t count, uint8_t* planes);

// Unpacks `count` planes into ids[count, rows, top_k] of one byte each (bits <= 8 only) or two.
// Returns -1, or the position in `ids` of an id that is not smaller than `experts` or a repetition within its token and
// layer; count * rows * top_k if bits after the last id of a plane are set.
template <typename Id>
int64_t unpack_routes(const uint8_t* planes, const RouteShape& shape, int64_t count, Id* ids);

// Whether `count` planes are valid, so that unpack_routes would return -1; needs no memory for ids.
bool routes_valid(const uint8_t* planes, const RouteShape& shape, int64_t count);

// Writes the CRC-32C of each of `count` planes. It covers four numbers of 64 bits before the plane: rows, the layer's
// number, top_k and experts, so that no layer can pass for another.
void digest_routes(const uint8_t* planes, const RouteShape& shape, const int64_t* layers, int64_t count,
                   uint32_t* digests);

}  // namespace asyncmoe::trajectory
