// What packers do, recorded: a saved tensor's save, reads and release, and their other work.

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

// What `pack` makes of the tensor, recorded if there is anything, it is no placeholder
// (placeholder_tensor.h), and the device's stream does not capture a graph. `place` and `is_leaf`
// as DeviceRecording::EndSave has them.
std::unique_ptr<SavedTensor> PackRecorded(const std::shared_ptr<DeviceRecording>& recording,
                                          const at::Tensor& tensor, uint64_t place, bool is_leaf,
                                          absl::FunctionRef<std::unique_ptr<SavedTensor>()> pack);

// Runs `work`, which is no part of the steps. Only the work itself throws.
void RunBeside(absl::Span<const std::shared_ptr<DeviceRecording>> recordings,
               absl::FunctionRef<void()> work);

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_RECORDED_TENSOR_H_
