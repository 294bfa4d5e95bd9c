#include "pinion/hooks/checkpoint/checkpoint.h"

#include <memory>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/checkpointed_segment.h"

namespace pinion::checkpoint_internal {

struct ForwardScope::State {
  explicit State(std::shared_ptr<CheckpointedSegment> of)
      : segment(std::move(of)), scope(segment->Packer()) {}
  ~State() { segment->EndForward(); }

  const std::shared_ptr<CheckpointedSegment> segment;
  const SavedTensorScope scope;
};

// The segment saves its inputs, which the scopes around this one pack.
ForwardScope::ForwardScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                           RunAgain again)
    : state_(std::make_unique<State>(
          std::make_shared<CheckpointedSegment>(options, inputs, std::move(again)))) {}

ForwardScope::~ForwardScope() = default;

}  // namespace pinion::checkpoint_internal
