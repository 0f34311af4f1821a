#include "device_delta.h"

#include <memory>
#include <stdexcept>

namespace asyncmoe {

DeltaFound checked(const DeltaFound& found) {
    if (found.faults)
        throw std::invalid_argument("payload of a delta: got one that does not fit, expected one of this message");
    return found;
}

DeltaFound emulate_delta_encode(const DeltaTable& table, int64_t chunk, const std::byte* now, std::byte* base,
                                std::byte* payload) {
    const DeltaView view = table.view(chunk, {}, base);
    const auto scratch = std::make_unique<CompareScratch>();
    std::vector<int64_t> bodies(static_cast<size_t>(view.count));
    DeltaFound found{};
    for (int64_t i = 0; i < view.count; ++i) add_found(found, survey(view, i, now, payload, *scratch));
    found.nbytes = place_bodies(view, payload, bodies.data(), scratch->sums);
    for (int64_t i = 0; i < view.count; ++i)
        code_block(view, i, now, payload, bodies[static_cast<size_t>(i)], *scratch);
    return found;
}

DeltaFound emulate_delta_apply(const DeltaTable& table, int64_t chunk, const std::byte* payload, int64_t nbytes,
                               const std::vector<int64_t>& bases, bool write) {
    const DeltaView view = table.view(chunk, bases, nullptr);
    const auto scratch = std::make_unique<ApplyScratch>();
    std::vector<int64_t> bodies(static_cast<size_t>(view.count));
    DeltaFound found{};
    found.faults = nbytes < kEntry * view.count ||
                   place_bodies(view, payload, bodies.data(), scratch->sums) != static_cast<uint64_t>(nbytes);
    for (int64_t i = 0; !found.faults && i < view.count; ++i)
        add_found(found, apply_coded(view, view.blocks[i], entry_of(payload, i),
                                     payload + bodies[static_cast<size_t>(i)], write, *scratch));
    return checked(found);
}

DeltaFound emulate_delta_read(const DeltaTable& table, int64_t chunk, const std::vector<int64_t>& bases,
                              std::byte* message) {
    const DeltaView view = table.view(chunk, bases, message);
    const auto sums = std::make_unique<OfTeam<uint64_t>>();
    DeltaFound found{};
    for (int64_t i = 0; i < view.count; ++i) found.sum += read_block(view, view.blocks[i], *sums);
    return found;
}

}  // namespace asyncmoe
