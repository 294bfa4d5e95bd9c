// A segment of forward whose saved tensors are computed again: what checkpoint() leaves behind in
// the graph.
//
// In forward the segment counts what autograd saves and keeps shapes alone. Each place in the graph
// holds a handle, {segment, number}. The first handle that a backward unpacks runs the segment
// again under a packer that puts each tensor into its place, by the order in which they are saved.
//
// Ownership: the handles own the segment; the segment owns the saved inputs and what was computed
// again. Tensors that one backward computed again and did not read go when it ends.
//
// Thread safety: thread-safe, since a backward reads from a thread for each device. One thread at a
// time computes a segment again, and one of the process where that sets generators of random
// numbers; mu_ is not held meanwhile.

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINTED_SEGMENT_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINTED_SEGMENT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/checkpoint/checkpoint_inputs.h"
#include "pinion/hooks/checkpoint/checkpoint_options.h"
#include "pinion/hooks/checkpoint/forward_state.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// A node that reads on another stream than the segment was computed on again.
inline constexpr WaitSite kComputedOnOtherStream("kComputedOnOtherStream", kHooksWaits);

class CheckpointedSegment : public std::enable_shared_from_this<CheckpointedSegment> {
 public:
  using Run = std::function<void(const std::vector<at::Tensor>& inputs)>;

  // Saves the inputs to the scopes that are open.
  CheckpointedSegment(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                      Run run);
  ~CheckpointedSegment();

  // Whether the innermost segment that the calling thread runs, for the first time or again, is one
  // that a plan may decide on (CheckpointOptions::if_planned).
  static bool RunsPlanned();

  // If the calling thread computes a segment again and has saved all that is needed of it, ends
  // that by an exception. Between two operators.
  static void StopTheOneAround();

  // Of the segment's forward.
  std::shared_ptr<SavedTensorPacker> Packer();
  // That forward has returned, or thrown: nothing more will be saved.
  void EndForward();

 private:
  class Handle;            // in the graph, in the place of a tensor
  class Packing;           // of a run of the segment:
  class ForwardPacker;     // leaves handles
  class CollectingPacker;  // fills places
  struct Recomputation;

  struct Description {
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    c10::Device device;

    static Description Of(const at::Tensor& tensor);
    bool operator==(const Description& other) const = default;
    std::string ToString() const;
  };
  struct Saved {
    Description description;
    bool is_needed = true;  // its handle is alive
  };
  // Computed again, and not read yet.
  struct Again {
    std::unique_ptr<SavedTensor> kept;
    std::optional<Description> description;
    std::optional<c10::Stream> made_on;  // none on the CPU
  };

  std::unique_ptr<SavedTensor> Save(const at::Tensor& tensor);
  std::unique_ptr<SavedTensor> Collect(const at::Tensor& tensor, const NodeId& node,
                                       Recomputation& recomputation);
  // Ends the run of the segment, by an exception, if all that is needed has been saved. The kernel
  // of `op` is next; null: none is.
  void StopIfDone(const c10::FunctionSchema* op, Recomputation& recomputation);
  at::Tensor Read(size_t number);
  void Forget(size_t number);

  std::shared_ptr<Recomputation> Find(int64_t backward);
  std::shared_ptr<Recomputation> ComputeAgain();
  void Check(const Recomputation& recomputation);

  const CheckpointOptions options_;
  const ForwardState forward_;
  const Run run_;
  const std::shared_ptr<CheckpointInputs> inputs_;

  // Held while the segment is computed again; a backward within it may do so on the same thread.
  std::recursive_mutex computing_;

  Mutex mu_;
  bool forward_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Saved> saved_ ABSL_GUARDED_BY(mu_);
  // By backward, those that run.
  absl::flat_hash_map<int64_t, std::shared_ptr<Recomputation>> recomputations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINTED_SEGMENT_H_
