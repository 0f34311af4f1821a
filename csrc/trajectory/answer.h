// The long parts of an engine's answer, which is JSON: arrays of numbers, and bytes in base64.
//
// Each function reads the form in which engines write such a part, and returns false for any other text, valid or not;
// a general reader then takes it or says what is wrong. A text may hold any bytes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace asyncmoe::trajectory {

// "[1, -2, 3]": whole numbers of 32 bits.
bool read_ints(std::string_view text, std::vector<int32_t>& values);

// "[-0.5, -1.25e-05]": numbers with a fraction or an exponent, rounded to a double and then to a float.
bool read_floats(std::string_view text, std::vector<float>& values);

// "[[-0.5, 17, null], ...]": a log-probability as in read_floats, a token, and no text.
bool read_entries(std::string_view text, std::vector<float>& logprobs, std::vector<int32_t>& tokens);

// "[[3, 1], [2], []]": lists of whole numbers; the number of ids in each, and the ids of all.
bool read_lists(std::string_view text, std::vector<int32_t>& counts, std::vector<int32_t>& ids);

// "\"AAEC\"", with padding and without escapes. Returns the number of bytes, or -1 if it is not of this form.
int64_t base64_bytes(std::string_view text);

// Writes base64_bytes(text) bytes, which is not negative. False if a character is none of base64's.
bool read_base64(std::string_view text, uint8_t* to);

}  // namespace asyncmoe::trajectory
