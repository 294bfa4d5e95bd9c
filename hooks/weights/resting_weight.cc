#include "pinion/hooks/weights/resting_weight.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

StoragePlace PlaceOf(const RestingWeight& weight) {
  const absl::StatusOr<std::shared_ptr<HostBuffer>> buffer =
      weight.parcel->ViewOnHost(absl::InfiniteDuration());
  ThrowIfError(buffer.status(), "reading a frozen weight on the host");
  const at::Tensor bytes = at::from_blob(
      static_cast<char*>((*buffer)->data()) + weight.offset_bytes,
      {static_cast<int64_t>(weight.form.resting_bytes())}, [owner = *buffer](void*) {}, at::kByte);
  return {.storage = bytes.storage()};
}

}  // namespace

c10::Storage WidenOnHost(const RestingWeight& weight) {
  const at::Tensor wide = at::empty({static_cast<int64_t>(weight.form.wide_bytes())}, at::kByte);
  Widen(PlaceOf(weight), weight.form, {.storage = wide.storage()});
  return wide.storage();
}

void RestAgain(const RestingWeight& weight, const c10::Storage& wide, const std::string& name) {
  const c10::Storage before = WidenOnHost(weight);
  if (std::memcmp(before.data(), wide.data(), before.nbytes()) == 0) return;
  const absl::Status narrowed = Narrow({.storage = wide}, weight.form, PlaceOf(weight));
  TORCH_CHECK(narrowed.ok(), name, " ", std::string(narrowed.message()));
}

}  // namespace pinion
