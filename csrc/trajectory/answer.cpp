#include "answer.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

namespace asyncmoe::trajectory {

namespace {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Reader {
  public:
    explicit Reader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    // Skips white space; takes the next character if it is `c`.
    bool take(char c) {
        skip();
        if (at_ == end_ || *at_ != c) return false;
        ++at_;
        return true;
    }

    bool take_null() {
        skip();
        if (end_ - at_ < 4 || std::string_view(at_, 4) != "null") return false;
        at_ += 4;
        return true;
    }

    bool at_end() {
        skip();
        return at_ == end_;
    }

    bool number(int32_t& value) {
        skip();
        const char* begin = at_;
        if (!digits_before_point() || (at_ != end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E'))) return false;
        const auto [last, error] = std::from_chars(begin, at_, value);
        return error == std::errc() && last == at_;
    }

    bool number(float& value) {
        skip();
        const char* begin = at_;
        if (!digits_before_point()) return false;
        bool whole = true;
        if (at_ != end_ && *at_ == '.') {
            whole = false;
            ++at_;
            if (!digits()) return false;
        }
        if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
            whole = false;
            ++at_;
            if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
            if (!digits()) return false;
        }
        double exact;
        const auto [last, error] = std::from_chars(begin, at_, exact);
        if (whole || error != std::errc() || last != at_) return false;
        if (std::fabs(exact) > std::numeric_limits<float>::max()) return false;
        value = static_cast<float>(exact);
        return true;
    }

    // Reads "[" item "," item ... "]".
    template <typename Item>
    bool array(Item&& item) {
        if (!take('[')) return false;
        if (take(']')) return true;
        do
            if (!item()) return false;
        while (take(','));
        return take(']');
    }

  private:
    void skip() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    }

    bool digits() {
        if (at_ == end_ || !is_digit(*at_)) return false;
        while (at_ != end_ && is_digit(*at_)) ++at_;
        return true;
    }

    // An optional sign and a whole number without leading zeros.
    bool digits_before_point() {
        if (at_ != end_ && *at_ == '-') ++at_;
        if (at_ == end_ || *at_ != '0') return digits();
        ++at_;
        return at_ == end_ || !is_digit(*at_);
    }

    const char *at_, *end_;
};

template <typename Value>
bool read_numbers(std::string_view text, std::vector<Value>& values) {
    Reader reader(text);
    const bool read = reader.array([&] {
        Value value;
        if (!reader.number(value)) return false;
        values.push_back(value);
        return true;
    });
    return read && reader.at_end();
}

constexpr uint32_t kWrong = 1u << 24;

// The 24 bits that character `c` contributes at each of the four places of a quantum; kWrong for no character of
// base64.
constexpr std::array<std::array<uint32_t, 256>, 4> places() {
    std::array<std::array<uint32_t, 256>, 4> made{};
    for (auto& place : made)
        for (auto& value : place) value = kWrong;
    constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (uint32_t i = 0; i < 64; ++i)
        for (uint32_t place = 0; place < 4; ++place)
            made[place][static_cast<uint8_t>(alphabet[i])] = i << (18 - 6 * place);
    return made;
}

constexpr auto kPlaces = places();

}  // namespace

bool read_ints(std::string_view text, std::vector<int32_t>& values) { return read_numbers(text, values); }

bool read_floats(std::string_view text, std::vector<float>& values) { return read_numbers(text, values); }

bool read_entries(std::string_view text, std::vector<float>& logprobs, std::vector<int32_t>& tokens) {
    Reader reader(text);
    const bool read = reader.array([&] {
        float logprob;
        int32_t token;
        const bool entry = reader.take('[') && reader.number(logprob) && reader.take(',') && reader.number(token) &&
                           reader.take(',') && reader.take_null() && reader.take(']');
        if (!entry) return false;
        logprobs.push_back(logprob);
        tokens.push_back(token);
        return true;
    });
    return read && reader.at_end();
}

bool read_lists(std::string_view text, std::vector<int32_t>& counts, std::vector<int32_t>& ids) {
    Reader reader(text);
    const bool read = reader.array([&] {
        const size_t before = ids.size();
        const bool list = reader.array([&] {
            int32_t id;
            if (!reader.number(id)) return false;
            ids.push_back(id);
            return true;
        });
        if (!list || ids.size() > INT32_MAX) return false;
        counts.push_back(static_cast<int32_t>(ids.size() - before));
        return true;
    });
    return read && reader.at_end();
}

int64_t base64_bytes(std::string_view text) {
    if (text.size() < 2 || text.size() % 4 != 2 || text.front() != '"' || text.back() != '"') return -1;
    const std::string_view inner = text.substr(1, text.size() - 2);
    int64_t padding = 0;
    while (padding < 2 && padding < static_cast<int64_t>(inner.size()) && inner[inner.size() - 1 - padding] == '=')
        ++padding;
    return static_cast<int64_t>(inner.size() / 4 * 3) - padding;
}

bool read_base64(std::string_view text, uint8_t* to) {
    const int64_t bytes = base64_bytes(text);
    const auto* from = reinterpret_cast<const uint8_t*>(text.data()) + 1;
    uint32_t wrong = 0;
    for (int64_t i = 0; i < bytes / 3; ++i, from += 4, to += 3) {
        const uint32_t bits = kPlaces[0][from[0]] | kPlaces[1][from[1]] | kPlaces[2][from[2]] | kPlaces[3][from[3]];
        wrong |= bits;
        to[0] = static_cast<uint8_t>(bits >> 16);
        to[1] = static_cast<uint8_t>(bits >> 8);
        to[2] = static_cast<uint8_t>(bits);
    }
    const int64_t left = bytes % 3;
    if (left) {
        const uint32_t bits = kPlaces[0][from[0]] | kPlaces[1][from[1]] | (left == 2 ? kPlaces[2][from[2]] : 0);
        wrong |= bits;
        wrong |= left == 2 ? (bits & 0xffu ? kWrong : 0) : (bits & 0xffffu ? kWrong : 0);  // bits that say nothing
        to[0] = static_cast<uint8_t>(bits >> 16);
        if (left == 2) to[1] = static_cast<uint8_t>(bits >> 8);
    }
    return (wrong & kWrong) == 0;
}

}  // namespace asyncmoe::trajectory
