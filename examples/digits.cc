#include "pinion/examples/digits.h"

#include "absl/types/span.h"

namespace pinion {
namespace {

constexpr Digit kDigits[] = {
#include "pinion/examples/digits_table.inc"
};

}  // namespace

absl::Span<const Digit> AllDigits() { return kDigits; }

}  // namespace pinion
