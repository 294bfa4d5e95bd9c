// Sizes that a user typed.
//
// Thread safety: thread-safe.

#ifndef PINION_PROGRAMS_PARSE_BYTES_H_
#define PINION_PROGRAMS_PARSE_BYTES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace pinion {

// "96MiB", "1.5GiB", "512KiB", "4096B" or "4096", from a byte to 2^50. InvalidArgument names `flag`
// and `text`, and `other` as what the flag takes beside sizes.
absl::StatusOr<uint64_t> ParseBytes(const char* flag, const std::string& text, const char* other);

}  // namespace pinion

#endif  // PINION_PROGRAMS_PARSE_BYTES_H_
