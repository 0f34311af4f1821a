#include "copy_table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace asyncmoe {

namespace {

constexpr int64_t kInt31 = int64_t{1} << 31;
// Shorter even parts of a box are merged into the uneven tile around them.
constexpr int64_t kLeastEvenUnits = 512;

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Whether units of a quantised box can be even: 16 elements are in one block, and positions within a tile fit in 31
// bits.
bool quantises_evenly(const Job& job) {
    const int64_t item = source_bytes(job.cast), steps = job.count ? kEvenUnits * kUnit / job.run + 2 : 0;
    const int64_t gap = job.count ? job.dims[0].source_stride - job.run * item : 0;
    const int64_t reach = job.width + steps * (gap / item) + kEvenUnits * kUnit;
    return job.width % kUnit == 0 && gap % (kUnit * item) == 0 && gap < kInt31 && reach < kInt31;
}

Rows rows_of(const Job& job) {
    const int64_t ratio = source_bytes(job.cast) / destination_bytes(job.cast);
    Rows rows{0, 0, 0, job.source >= 0 && job.count <= 1 && (!to_float8(job.cast) || quantises_evenly(job))};
    if (!rows.even || job.count == 0) return rows;
    const JobDim& dim = job.dims[0];
    const int64_t units = job.run / kUnit, source = dim.source_stride - job.run * ratio,
                  destination = dim.destination_stride - job.run;
    rows.even = job.run % kUnit == 0 && units >= 2 && source % kUnit == 0 && destination % kUnit == 0 && source >= 0 &&
                destination >= 0 && source < kInt31 && destination < kInt31;
    if (!rows.even || units > kMostRunUnits) return rows;
    rows.multiplier = static_cast<uint32_t>(((int64_t{1} << 32) + units - 1) / units);
    rows.source_gap = static_cast<uint32_t>(source);
    rows.destination_gap = static_cast<uint32_t>(destination);
    return rows;
}

}  // namespace

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
    job.small = job.bytes < kInt31;
    if (job.small) job.run_divider = divider_of(job.run);
    for (int k = 0; k < copy.count; ++k) {
        const Dim& dim = copy.dims[static_cast<size_t>(k)];
        job.dims[k] = {dim.extent, dim.source_stride, dim.destination_stride, {}};
        if (job.small) job.dims[k].divider = divider_of(dim.extent);
    }
    if (to_float8(job.cast) && job.width < kInt31) job.width_divider = divider_of(job.width);
    job.rows = rows_of(job);
    return job;
}

namespace {

// The tiles of one chunk, in order.
class Tiler {
  public:
    Tiler(const Job* jobs, int64_t count, int64_t bytes, std::vector<Tile>& tiles)
        : jobs_(jobs), count_(static_cast<int>(count)), units_((bytes + kUnit - 1) / kUnit), tiles_(tiles) {}

    void run() {
        for (int job = 0; job < count_; ++job) add_evenly(job);
        add_unevenly(units_);
    }

  private:
    void add_evenly(int number) {
        const Job& job = jobs_[number];
        const int64_t end = (job.at + job.bytes) / kUnit;
        int64_t unit = (job.at + kUnit - 1) / kUnit;
        if (end - unit < kLeastEvenUnits || !begins_evenly(job, unit * kUnit - job.at)) return;
        add_unevenly(unit);
        while (unit < end) {
            const Place place = locate(job, unit * kUnit - job.at);
            int64_t units = std::min(end - unit, kEvenUnits), column = 0;
            if (job.rows.multiplier)
                column = (job.run - place.left) / kUnit;
            else
                units = std::min(units, place.left / kUnit);
            tiles_.push_back({unit, place.source, place.destination, number, number, static_cast<int32_t>(column),
                              static_cast<int32_t>(units)});
            unit += units;
        }
        done_ = end;
    }

    // Whether all units of a box are even if the first begins at `position`, regardless of the bases' alignment.
    static bool begins_evenly(const Job& job, int64_t position) {
        if (!job.rows.even || position % (job.count ? kUnit : destination_bytes(job.cast)) != 0) return false;
        const Place place = locate(job, position);
        const int64_t step = to_float8(job.cast) ? kUnit * source_bytes(job.cast) : kUnit;
        return place.source % step == 0 && place.destination % kUnit == 0;
    }

    void add_unevenly(int64_t end) {
        for (; done_ < end; done_ = std::min(end, done_ + kUnevenUnits)) {
            const int64_t units = std::min(end - done_, kUnevenUnits);
            const int first = job_at(jobs_, 0, count_ - 1, done_ * kUnit),
                      last = job_at(jobs_, first, count_ - 1, (done_ + units) * kUnit - 1);
            tiles_.push_back({done_, 0, 0, first, last, kUneven, static_cast<int32_t>(units)});
        }
    }

    const Job* jobs_;
    int count_;
    int64_t units_;
    std::vector<Tile>& tiles_;
    int64_t done_ = 0;  // units already in tiles
};

}  // namespace

CopyTable::CopyTable(const Program& program) : wire(program.wire()) {
    const auto& descriptors = program.descriptors();
    if (descriptors.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        throw std::invalid_argument("copies of a program on a GPU: got " + std::to_string(descriptors.size()) +
                                    ", expected below 2^31");
    for (int64_t c = 0; c < program.chunks(); ++c) {
        Chunk chunk{static_cast<int64_t>(jobs.size()), static_cast<int64_t>(tiles.size()), 0, 0};
        const auto first = static_cast<size_t>(program.firsts()[static_cast<size_t>(c)]);
        const auto last = static_cast<size_t>(program.firsts()[static_cast<size_t>(c) + 1]);
        for (size_t i = first; i < last; ++i) {
            if (descriptors[i].copy.bytes() == 0) continue;
            if (wire == Wire::kNone) chunk.bytes = rounded_up(chunk.bytes, kUnit);
            jobs.push_back(job_of(descriptors[i], chunk.bytes));
            chunk.bytes += jobs.back().bytes;
        }
        Tiler(jobs.data() + chunk.first_job, static_cast<int64_t>(jobs.size()) - chunk.first_job, chunk.bytes, tiles)
            .run();
        chunk.tiles = static_cast<int64_t>(tiles.size()) - chunk.first_tile;
        chunks.push_back(chunk);
    }
}

namespace {

ChunkView view_of(const CopyTable& table, int64_t number, const std::vector<int64_t>& sources,
                  const std::vector<int64_t>& destinations) {
    const auto& chunk = table.chunks[static_cast<size_t>(number)];
    const int64_t message = table.wire == Wire::kSource        ? sources[0]
                            : table.wire == Wire::kDestination ? destinations[0]
                                                               : 0;
    return {table.jobs.data() + chunk.first_job,
            table.tiles.data() + chunk.first_tile,
            sources.data(),
            destinations.data(),
            reinterpret_cast<std::byte*>(message),
            chunk.bytes};
}

}  // namespace

uint64_t emulate(const Program& program, const CopyTable& table, int64_t number, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int blocks) {
    program.check(number, sources, destinations);
    const auto& chunk = table.chunks[static_cast<size_t>(number)];
    if (chunk.bytes == 0) return table.wire == Wire::kNone ? 0 : mix(0);
    const ChunkView view = view_of(table, number, sources, destinations);
    const auto copy = table.wire == Wire::kNone     ? copy_tile<Wire::kNone>
                      : table.wire == Wire::kSource ? copy_tile<Wire::kSource>
                                                    : copy_tile<Wire::kDestination>;
    auto sum = static_cast<uint64_t>(chunk.bytes);
    for (int block = 0; block < blocks; ++block)
        for (int64_t tile = block; tile < chunk.tiles; tile += blocks)
            for (int thread = 0; thread < kThreads; ++thread) sum += copy(view, view.tiles[tile], thread);
    return table.wire == Wire::kNone ? 0 : mix(sum);
}

std::array<std::array<Share, kCasts>, kWays> ways(const Program& program, const CopyTable& table, int64_t number,
                                                  const std::vector<int64_t>& sources,
                                                  const std::vector<int64_t>& destinations) {
    program.check(number, sources, destinations);
    std::array<std::array<Share, kCasts>, kWays> found{};
    const auto& chunk = table.chunks[static_cast<size_t>(number)];
    if (chunk.bytes == 0) return found;
    const ChunkView view = view_of(table, number, sources, destinations);
    const auto evenly = table.wire == Wire::kNone     ? goes_evenly<Wire::kNone>
                        : table.wire == Wire::kSource ? goes_evenly<Wire::kSource>
                                                      : goes_evenly<Wire::kDestination>;
    for (int64_t i = 0; i < chunk.tiles; ++i) {
        const Tile& tile = view.tiles[i];
        const Job& job = view.jobs[tile.job];
        const bool even = evenly(view, tile);
        const bool one = !job.rows.multiplier || (tile.column + tile.units) * kUnit <= job.run;
        const auto way = static_cast<size_t>(!even ? Way::kUneven : one ? Way::kRun : Way::kRows);
        Share& share = found[way][even ? static_cast<size_t>(job.cast) : 0];
        ++share.tiles;
        share.bytes += std::min(tile.units * kUnit, chunk.bytes - tile.unit * kUnit);
    }
    return found;
}

}  // namespace asyncmoe
