#include "pinion/hooks/checkpoint/checkpoint.h"

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/checkpointed_segment.h"

namespace pinion::checkpoint_internal {
namespace {

// Returns the only device other than the CPU that inputs are on, or nothing.
std::optional<c10::Device> DeviceOf(const std::vector<at::Tensor>& inputs) {
  std::optional<c10::Device> device;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.is_cpu()) continue;
    if (device.has_value() && *device != input.device()) return std::nullopt;
    device = input.device();
  }
  return device;
}

}  // namespace

struct ForwardScope::State {
  State(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, RunAgain again) {
    // A planned segment must have one device. Others are checkpoints of their own.
    const std::optional<c10::Device> device = options.if_planned ? DeviceOf(inputs) : std::nullopt;
    if (device.has_value()) {
      if (CheckpointedSegment::RunsPlanned()) return;  // part of the enclosing recomputation
      const std::optional<uint32_t> ordinal = KeepSegment({.device = *device, .inputs = inputs});
      if (ordinal.has_value()) {
        part.emplace(SegmentPart{.device = *device, .ordinal = *ordinal, .packer = ActivePacker()});
        return;
      }
    }
    segment = std::make_shared<CheckpointedSegment>(options, inputs, std::move(again));
    CheckpointedSegment::StopTheOneAround();  // the inputs may be its last needed tensors
    scope.emplace(segment->Packer());
  }
  ~State() {
    if (segment != nullptr) segment->EndForward();
  }

  // `part` is set if the segment is kept, `segment` and `scope` if it is recomputed by itself, none
  // if an enclosing planned segment recomputes it.
  std::optional<SegmentPartScope> part;
  std::shared_ptr<CheckpointedSegment> segment;
  std::optional<SavedTensorScope> scope;
};

ForwardScope::ForwardScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                           RunAgain again)
    : state_(std::make_unique<State>(options, inputs, std::move(again))) {}

ForwardScope::~ForwardScope() = default;

}  // namespace pinion::checkpoint_internal
