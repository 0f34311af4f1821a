#include "device_delta.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "delta_compare.h"
#include "delta_scatter.h"

namespace asyncmoe {
namespace {

DeltaRow row_of(const DeltaTable::Row& row, int64_t begin) {
    DeltaRow made{begin,
                  row.place,
                  row.index,
                  row.seed,
                  static_cast<int32_t>(row.base),
                  static_cast<uint32_t>(row.elements),
                  static_cast<uint32_t>(row.run),
                  row.count,
                  {}};
    for (int k = 0; k < row.count; ++k) {
        const Dim& dim = row.dims[static_cast<size_t>(k)];
        made.dims[k] = {static_cast<uint32_t>(dim.extent), dim.source_stride, dim.destination_stride};
    }
    return made;
}

DeltaView view_of(const DeltaJobs& jobs, int64_t chunk, const int64_t* bases) {
    const int64_t first = jobs.first_block[static_cast<size_t>(chunk)];
    return {jobs.blocks.data() + first, jobs.rows.data(), bases,
            jobs.first_block[static_cast<size_t>(chunk) + 1] - first};
}

}  // namespace

DeltaJobs::DeltaJobs(const DeltaTable& table) : first_block{0}, most_blocks(0) {
    rows.reserve(static_cast<size_t>(table.firsts().back()));
    for (int64_t chunk = 0; chunk < table.chunks(); ++chunk) {
        for (const auto* block = table.begin(chunk); block != table.end(chunk); ++block) {
            int64_t begin = 0;
            for (int64_t i = block->first; i < block->last; ++i) {
                rows.push_back(row_of(table.row(i), begin));
                begin += table.row(i).elements;
            }
            blocks.push_back(*block);
        }
        most_blocks = std::max(most_blocks, static_cast<int64_t>(blocks.size()) - first_block.back());
        first_block.push_back(static_cast<int64_t>(blocks.size()));
    }
}

DeltaFound checked(const DeltaFound& found) {
    if (found.faults) throw std::invalid_argument("payload of a delta: got a fault, expected none");
    return found;
}

DeltaFound emulate_delta_encode(const DeltaTable& table, int64_t chunk, const std::byte* now, const std::byte* old,
                                std::byte* payload) {
    table.check_message(chunk);
    const DeltaJobs jobs(table);
    const DeltaView view = view_of(jobs, chunk, nullptr);
    const auto scratch = std::make_unique<CompareScratch>();
    std::vector<int64_t> bodies(static_cast<size_t>(view.count));
    DeltaFound found{};
    for (int64_t i = 0; i < view.count; ++i) add_found(found, survey(view, i, now, old, payload, *scratch));
    found.nbytes = place_bodies(view, payload, bodies.data(), scratch->sums);
    for (int64_t i = 0; i < view.count; ++i)
        code_block(view, i, now, old, payload, bodies[static_cast<size_t>(i)], *scratch);
    return found;
}

DeltaFound emulate_delta_apply(const DeltaTable& table, int64_t chunk, const std::byte* payload, int64_t nbytes,
                               const std::vector<int64_t>& bases, bool write) {
    table.check_bases(bases, false);
    const DeltaJobs jobs(table);
    const DeltaView view = view_of(jobs, chunk, bases.data());
    const auto scratch = std::make_unique<ApplyScratch>();
    std::vector<int64_t> bodies(static_cast<size_t>(view.count));
    DeltaFound found{};
    found.faults = nbytes < kEntry * view.count ||
                   place_bodies(view, payload, bodies.data(), scratch->sums) != static_cast<uint64_t>(nbytes);
    for (int64_t i = 0; !found.faults && i < view.count; ++i) {
        const std::byte* body = payload + bodies[static_cast<size_t>(i)];
        const Applied applied = apply_block(view, view.blocks[i], entry_of(payload, i), body, write, *scratch);
        found.sum += applied.sum;
        found.faults += !applied.good;
    }
    return checked(found);
}

DeltaFound emulate_delta_read(const DeltaTable& table, int64_t chunk, const std::vector<int64_t>& bases) {
    table.check_bases(bases, true);
    const DeltaJobs jobs(table);
    const DeltaView view = view_of(jobs, chunk, bases.data());
    const auto sums = std::make_unique<OfTeam<uint64_t>>();
    DeltaFound found{};
    for (int64_t i = 0; i < view.count; ++i) found.sum += read_block(view, view.blocks[i], *sums);
    return found;
}

}  // namespace asyncmoe
