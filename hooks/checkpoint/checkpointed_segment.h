// The graph's side of checkpoint(): a segment of forward whose saved tensors are recomputed.
//
// In forward, autograd saves a handle {segment, number} for each tensor, and the segment stores the
// tensor's shape. The first handle that a backward unpacks runs the segment again. A packer then
// matches tensors to numbers by the order in which they are saved.
//
// Ownership: handles own the segment; the segment owns saved inputs and recomputed tensors. A
// backward's unread recomputed tensors are freed when it ends.
//
// Thread safety: thread-safe, since a backward has a thread per device. One thread at a time
// recomputes a segment. Of segments that set random number generators, one is recomputed at a time
// in the process. mu_ is not held during a recomputation.

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
#include "pinion/hooks/checkpoint/checkpoint_options.h"
#include "pinion/hooks/checkpoint/forward_state.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// The wait of a stream that reads a tensor which was recomputed on another stream.
inline constexpr WaitSite kComputedOnOtherStream("kComputedOnOtherStream", kHooksWaits);

class CheckpointedSegment : public std::enable_shared_from_this<CheckpointedSegment> {
 public:
  using Run = std::function<void(const std::vector<at::Tensor>& inputs)>;

  // Saves the inputs to the open scopes.
  CheckpointedSegment(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                      Run run);
  ~CheckpointedSegment();

  // Returns whether the calling thread's innermost running segment has
  // CheckpointOptions::if_planned.
  static bool RunsPlanned();

  // Throws to end a recomputation on the calling thread that has saved all needed tensors. Call it
  // between two operators.
  static void StopTheOneAround();

  // Returns the packer for the segment's forward.
  std::shared_ptr<SavedTensorPacker> Packer();
  // Marks the end of forward, by return or exception. Nothing is saved after it.
  void EndForward();

 private:
  class Handle;            // replaces a saved tensor in the graph
  class Packing;           // base of the packers below
  class ForwardPacker;     // saves handles
  class CollectingPacker;  // collects recomputed tensors
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
  // A recomputed tensor that has not been read.
  struct Again {
    std::unique_ptr<SavedTensor> kept;
    std::optional<Description> description;
    std::optional<c10::Stream> made_on;  // none on the CPU
  };

  std::unique_ptr<SavedTensor> Save(const at::Tensor& tensor);
  std::unique_ptr<SavedTensor> Collect(const at::Tensor& tensor, const NodeId& node,
                                       Recomputation& recomputation);
  // Throws to end the recomputation if all needed tensors are saved; throws only once. `op` is the
  // operator whose kernel runs next, or null.
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

  // Held during a recomputation. Recursive, since a backward inside it may recompute the segment.
  std::recursive_mutex computing_;

  Mutex mu_;
  bool forward_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Saved> saved_ ABSL_GUARDED_BY(mu_);
  // By id of the running backward.
  absl::flat_hash_map<int64_t, std::shared_ptr<Recomputation>> recomputations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINTED_SEGMENT_H_
