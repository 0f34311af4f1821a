#include "masks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace asyncmoe::trajectory {

namespace {

enum Way : uint8_t { kPacked = 0, kGaps = 1 };

int bits_of(int64_t vocabulary) {
    int bits = 1;
    while (int64_t{1} << bits < vocabulary) ++bits;
    return bits;
}

int64_t base128_bytes(uint32_t value) {
    int64_t bytes = 1;
    while (value >>= 7) ++bytes;
    return bytes;
}

void put_base128(std::vector<uint8_t>& bytes, uint32_t value) {
    for (; value >= 128; value >>= 7) bytes.push_back(static_cast<uint8_t>(value | 128));
    bytes.push_back(static_cast<uint8_t>(value));
}

[[noreturn]] void refuse(const std::string& what, int64_t got, const std::string& expected) {
    throw std::invalid_argument(what + ": got " + std::to_string(got) + ", expected " + expected);
}

[[noreturn]] void refuse_row(int64_t row, const std::string& got) {
    throw std::invalid_argument("row " + std::to_string(row) + ": got " + got);
}

void check_id(int64_t row, int64_t before, int64_t id, int64_t vocabulary) {
    if (id < 0 || id >= vocabulary)
        refuse_row(row, "id " + std::to_string(id) + ", expected one of 0 to " + std::to_string(vocabulary - 1));
    if (id <= before)
        refuse_row(row, "id " + std::to_string(id) + " after " + std::to_string(before) + ", expected ascending ids");
}

constexpr const char* kEnds = "the end of the bytes, expected a number";

class Reader {
  public:
    Reader(const uint8_t* bytes, int64_t size) : at_(bytes), end_(bytes + size) {}

    int64_t left() const { return end_ - at_; }

    // Reads a value below 2^31 in its shortest encoding.
    int64_t base128(int64_t row) {
        uint64_t value = 0;
        for (int shift = 0; shift < 35; shift += 7) {
            if (at_ == end_) refuse_row(row, kEnds);
            const uint8_t byte = *at_++;
            value |= uint64_t{byte & 127u} << shift;
            if (byte & 128) continue;
            if (value >> 31 || (byte == 0 && shift)) break;
            return static_cast<int64_t>(value);
        }
        refuse_row(row, "a number in too many bytes, expected one below 2^31 in its shortest encoding");
    }

    int64_t packed(int64_t row, int bits) {
        for (; held_ < bits; held_ += 8) {
            if (at_ == end_) refuse_row(row, kEnds);
            word_ |= uint64_t{*at_++} << held_;
        }
        const auto value = static_cast<int64_t>(word_ & ((uint64_t{1} << bits) - 1));
        word_ >>= bits;
        held_ -= bits;
        return value;
    }

    bool at_end() const { return at_ == end_ && word_ == 0; }

  private:
    const uint8_t *at_, *end_;
    uint64_t word_ = 0;
    int held_ = 0;
};

void put_packed(std::vector<uint8_t>& bytes, const int32_t* ids, int64_t count, int bits) {
    uint64_t word = 0;
    int held = 0;
    for (int64_t i = 0; i < count; ++i) {
        word |= static_cast<uint64_t>(ids[i]) << held;
        for (held += bits; held >= 8; held -= 8, word >>= 8) bytes.push_back(static_cast<uint8_t>(word));
    }
    if (held) bytes.push_back(static_cast<uint8_t>(word));
}

}  // namespace

std::vector<uint8_t> encode_masks(const int32_t* offsets, int64_t rows, const int32_t* ids, int64_t vocabulary) {
    int64_t gap_bytes = 0;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t before = -1;
        for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
            check_id(row, before, ids[i], vocabulary);
            gap_bytes += base128_bytes(static_cast<uint32_t>(ids[i] - before - 1));
            before = ids[i];
        }
    }
    const int bits = bits_of(vocabulary);
    const int64_t count = offsets[rows], packed_bytes = (count * bits + 7) / 8;
    const Way way = packed_bytes <= gap_bytes ? kPacked : kGaps;
    std::vector<uint8_t> bytes{way};
    bytes.reserve(static_cast<size_t>(1 + 2 * rows + std::min(packed_bytes, gap_bytes)));
    for (int64_t row = 0; row < rows; ++row) put_base128(bytes, static_cast<uint32_t>(offsets[row + 1] - offsets[row]));
    if (way == kPacked) {
        put_packed(bytes, ids, count, bits);
        return bytes;
    }
    for (int64_t row = 0; row < rows; ++row) {
        int64_t before = -1;
        for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
            put_base128(bytes, static_cast<uint32_t>(ids[i] - before - 1));
            before = ids[i];
        }
    }
    return bytes;
}

Masks decode_masks(const uint8_t* bytes, int64_t size, int64_t rows, int64_t count, int64_t vocabulary) {
    const int bits = bits_of(vocabulary);
    if (size < 1 + rows) refuse("bytes", size, "at least " + std::to_string(1 + rows) + " for this number of rows");
    const uint8_t way = bytes[0];
    if (way != kPacked && way != kGaps) refuse("encoding", way, "0 (packed) or 1 (gaps)");
    const int64_t most = way == kPacked ? (size - 1 - rows) * 8 / bits : size - 1 - rows;
    if (count > most) refuse("ids", count, "at most " + std::to_string(most) + " in these bytes");
    Reader reader(bytes + 1, size - 1);
    Masks masks;
    masks.offsets.reserve(static_cast<size_t>(rows + 1));
    masks.offsets.push_back(0);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t end = masks.offsets.back() + reader.base128(row);
        if (end > count) refuse("ids up to row " + std::to_string(row), end, "at most " + std::to_string(count));
        masks.offsets.push_back(static_cast<int32_t>(end));
    }
    if (masks.offsets.back() != count) refuse("ids of all rows", masks.offsets.back(), std::to_string(count));
    masks.ids.reserve(static_cast<size_t>(count));
    for (int64_t row = 0; row < rows; ++row) {
        int64_t before = -1;
        for (int64_t i = masks.offsets[row]; i < masks.offsets[row + 1]; ++i) {
            const int64_t id = way == kPacked ? reader.packed(row, bits) : before + 1 + reader.base128(row);
            check_id(row, before, id, vocabulary);
            masks.ids.push_back(static_cast<int32_t>(id));
            before = id;
        }
    }
    if (!reader.at_end()) throw std::invalid_argument("end: got bytes after the last id, expected none");
    return masks;
}

}  // namespace asyncmoe::trajectory
