// Parses sizes of the command line.
//
// Thread safety: thread-safe.

#ifndef PINION_PROGRAMS_PARSE_BYTES_H_
#define PINION_PROGRAMS_PARSE_BYTES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace pinion {

// Parses "96MiB", "1.5GiB", "512KiB", "4096B" or "4096", up to 2^50. InvalidArgument names `flag`,
// `text`, and `other`, the flag's alternative to a size.
absl::StatusOr<uint64_t> ParseBytes(const char* flag, const std::string& text, const char* other);

}  // namespace pinion

#endif  // PINION_PROGRAMS_PARSE_BYTES_H_
