#include "pinion/hooks/plan/saved_signature.h"

#include <c10/core/ScalarType.h>

namespace pinion {

uint64_t PlaceNumber(const NodeId& begin, const GraphPlace& place) {
  return 2 * NodesSince(begin, place.node).value_or(0) + (place.is_output ? 1 : 0);
}

// FNV-1a, which is the same in every process, unlike absl::Hash.
uint64_t SignatureOf(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  add(place);
  add(size_bytes);
  add(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
  return hash;
}

}  // namespace pinion
