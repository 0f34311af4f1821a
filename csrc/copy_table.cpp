#include "copy_table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace asyncmoe {

Job job_of(const Descriptor& descriptor, int64_t at) {
    const BoxCopy& copy = descriptor.copy;
    Job job{};
    job.at = at;
    job.bytes = copy.bytes();
    job.run = copy.run * copy.destination_unit();
    job.source_offset = descriptor.source_offset;
    job.destination_offset = descriptor.destination_offset;
    job.source = descriptor.source_index < 0 ? -1 : static_cast<int32_t>(descriptor.source_index);
    job.destination = static_cast<int32_t>(descriptor.destination_index);
    job.count = static_cast<int16_t>(copy.count);
    job.cast = copy.cast;
    job.scales = static_cast<int32_t>(std::max<int64_t>(descriptor.scales_index, -1));
    job.width = copy.blocks.width;
    job.columns = copy.blocks.columns;
    job.small = job.bytes < int64_t{1} << 31;
    if (job.small) job.run_divider = divider_of(job.run);
    for (int k = 0; k < copy.count; ++k) {
        const Dim& dim = copy.dims[static_cast<size_t>(k)];
        job.dims[k] = {dim.extent, dim.source_stride, dim.destination_stride, {}};
        if (job.small) job.dims[k].divider = divider_of(dim.extent);
    }
    return job;
}

namespace {

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

CopyTable::CopyTable(const Program& program) : wire(program.wire()) {
    const auto& descriptors = program.descriptors();
    if (descriptors.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        throw std::invalid_argument("more copies than a GPU's table holds");
    for (int64_t c = 0; c < program.chunks(); ++c) {
        Chunk chunk{static_cast<int64_t>(jobs.size()), static_cast<int64_t>(tile_jobs.size()), 0, 0};
        const auto first = static_cast<size_t>(program.firsts()[static_cast<size_t>(c)]);
        const auto last = static_cast<size_t>(program.firsts()[static_cast<size_t>(c) + 1]);
        for (size_t i = first; i < last; ++i) {
            if (descriptors[i].copy.bytes() == 0) continue;
            if (wire == Wire::kNone) chunk.bytes = rounded_up(chunk.bytes, kUnit);
            jobs.push_back(job_of(descriptors[i], chunk.bytes));
            chunk.bytes += jobs.back().bytes;
        }
        const int64_t tile_bytes = kTileUnits * kUnit;
        chunk.tiles = (chunk.bytes + tile_bytes - 1) / tile_bytes;
        const auto jobs_here = static_cast<int>(static_cast<int64_t>(jobs.size()) - chunk.first_job);
        for (int64_t tile = 0; tile <= chunk.tiles && chunk.tiles > 0; ++tile)
            tile_jobs.push_back(job_at(jobs.data() + chunk.first_job, 0, jobs_here - 1, tile * tile_bytes));
        chunks.push_back(chunk);
    }
}

uint64_t emulate(const Program& program, const CopyTable& table, int64_t number, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int blocks) {
    program.check(number, sources, destinations);
    const auto& chunk = table.chunks[static_cast<size_t>(number)];
    if (chunk.bytes == 0) return table.wire == Wire::kNone ? 0 : mix(0);
    const int64_t message = table.wire == Wire::kSource        ? sources[0]
                            : table.wire == Wire::kDestination ? destinations[0]
                                                               : 0;
    const ChunkView view{table.jobs.data() + chunk.first_job,
                         table.tile_jobs.data() + chunk.first_tile,
                         sources.data(),
                         destinations.data(),
                         reinterpret_cast<std::byte*>(message),
                         chunk.bytes};
    const auto copy = table.wire == Wire::kNone     ? copy_tile<Wire::kNone>
                      : table.wire == Wire::kSource ? copy_tile<Wire::kSource>
                                                    : copy_tile<Wire::kDestination>;
    auto sum = static_cast<uint64_t>(chunk.bytes);
    for (int block = 0; block < blocks; ++block)
        for (int64_t tile = block; tile < chunk.tiles; tile += blocks)
            for (int thread = 0; thread < kThreads; ++thread) sum += copy(view, tile, thread);
    return table.wire == Wire::kNone ? 0 : mix(sum);
}

}  // namespace asyncmoe
