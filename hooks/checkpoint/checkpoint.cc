#include "pinion/hooks/checkpoint/checkpoint.h"

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/segment_part.h"
#include "pinion/hooks/checkpoint/checkpointed_segment.h"

namespace pinion::checkpoint_internal {
namespace {

// The one device, beside the CPU, that the inputs are on.
std::optional<c10::Device> DeviceOf(const std::vector<at::Tensor>& inputs) {
  std::optional<c10::Device> device;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.is_cpu()) continue;
    if (device.has_value() && *device != input.device()) return std::nullopt;
    device = input.device();
  }
  return device;
}

// The segment saves its inputs, which the scopes around this one pack.
std::shared_ptr<CheckpointedSegment> NewSegment(const CheckpointOptions& options,
                                                const std::vector<at::Tensor>& inputs,
                                                RunAgain again,
                                                const std::optional<c10::Device>& device) {
  std::optional<SegmentPartScope> part;
  // What an inner segment saves is its outer one's.
  if (device.has_value() && !CurrentSegmentPart().has_value()) {
    part.emplace(SegmentPart{.device = *device, .is_input = true});
  }
  return std::make_shared<CheckpointedSegment>(options, inputs, std::move(again));
}

}  // namespace

struct ForwardScope::State {
  State(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, RunAgain again) {
    const std::optional<c10::Device> device = options.if_planned ? DeviceOf(inputs) : std::nullopt;
    segment = NewSegment(options, inputs, std::move(again), device);
    const std::optional<uint32_t> kept = device.has_value() ? KeepSegment(*device) : std::nullopt;
    if (kept.has_value()) {
      part.emplace(SegmentPart{.device = *device, .ordinal = *kept});
    } else {
      scope.emplace(segment->Packer());
    }
  }
  ~State() { segment->EndForward(); }

  std::shared_ptr<CheckpointedSegment> segment;
  std::optional<SegmentPartScope> part;   // where the segment is kept
  std::optional<SavedTensorScope> scope;  // where it is not
};

ForwardScope::ForwardScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                           RunAgain again)
    : state_(std::make_unique<State>(options, inputs, std::move(again))) {}

ForwardScope::~ForwardScope() = default;

}  // namespace pinion::checkpoint_internal
