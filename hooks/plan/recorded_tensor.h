// Records a saved tensor's save, reads and release, and the packers' other work.

#ifndef PINION_HOOKS_PLAN_RECORDED_TENSOR_H_
#define PINION_HOOKS_PLAN_RECORDED_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/device_recording.h"

namespace pinion {

// Calls `pack` and records its result. Returns an unrecorded result if that is null or a
// placeholder (placeholder_tensor.h), or if the device's stream captures a graph. `place` and
// `is_leaf` as in DeviceRecording::EndSave.
std::unique_ptr<SavedTensor> PackRecorded(const std::shared_ptr<DeviceRecording>& recording,
                                          const at::Tensor& tensor, uint64_t place, bool is_leaf,
                                          absl::FunctionRef<std::unique_ptr<SavedTensor>()> pack);

// Runs `work` and excludes it from the recordings. Throws only what `work` throws.
void RunBeside(absl::Span<const std::shared_ptr<DeviceRecording>> recordings,
               absl::FunctionRef<void()> work);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_RECORDED_TENSOR_H_
