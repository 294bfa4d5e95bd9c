#include "pinion/programs/parse_bytes.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {

absl::StatusOr<uint64_t> ParseBytes(const char* flag, const std::string& text, const char* other) {
  const size_t digits_end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string unit = text.substr(digits_end);
  double value = 0;
  double scale = 0;
  for (const auto& [name, bytes] : {std::pair<const char*, uint64_t>{"", 1},
                                    {"B", 1},
                                    {"KiB", kKiB},
                                    {"MiB", kMiB},
                                    {"GiB", kGiB}}) {
    if (unit == name) scale = static_cast<double>(bytes);
  }
  constexpr double kMost = static_cast<double>(uint64_t{1} << 50);
  if (!absl::SimpleAtod(text.substr(0, digits_end), &value) || scale == 0 ||
      !(value * scale >= 1 && value * scale <= kMost)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", text,
                     " is not a size: write it as 96MiB, 1.5GiB, a number of bytes, or ", other));
  }
  return static_cast<uint64_t>(value * scale);
}

}  // namespace pinion
