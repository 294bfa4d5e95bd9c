#include "pinion/allocator/allocator_options.h"

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// False for NaN too.
bool IsPercent(double value) { return value > 0 && value <= 100; }

absl::Status Refuse(const std::string& field, const std::string& value, const std::string& rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("AllocatorOptions::", field, " is ", value, "; it must be ", rule));
}

}  // namespace

absl::Status AllocatorOptions::Validate() const {
  if (!IsPercent(high_percent)) {
    return Refuse("high_percent", absl::StrCat(high_percent), "above 0 and at most 100");
  }
  if (!IsPercent(warn_percent) || warn_percent > high_percent) {
    return Refuse("warn_percent", absl::StrCat(warn_percent),
                  absl::StrCat("above 0 and at most high_percent (", high_percent, ")"));
  }
  if (!IsPercent(low_percent) || low_percent > high_percent) {
    return Refuse("low_percent", absl::StrCat(low_percent),
                  absl::StrCat("above 0 and at most high_percent (", high_percent, ")"));
  }
  if (max_locked_bytes == 0) {
    return Refuse("max_locked_bytes", "0", "positive; leave the default for no limit");
  }
  if (segment_bytes == 0 || segment_bytes > (uint64_t{1} << 47)) {
    return Refuse("segment_bytes", absl::StrCat(segment_bytes),
                  "positive, at most 2^47, and a multiple of the source's granularity");
  }
  if (alignment_bytes < 4096 || !IsPowerOfTwo(alignment_bytes)) {
    return Refuse("alignment_bytes", absl::StrCat(alignment_bytes),
                  "a power of two from 4096 up to the source's granularity");
  }
  if (max_wait_for_deferred < absl::ZeroDuration()) {
    return Refuse("max_wait_for_deferred", absl::FormatDuration(max_wait_for_deferred),
                  "zero or more");
  }
  return absl::OkStatus();
}

}  // namespace pinion
