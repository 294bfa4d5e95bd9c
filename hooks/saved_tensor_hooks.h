// Saved-tensor hooks from C++: the one place that touches LibTorch's unstable internals.
//
// LibTorch keeps default saved-tensor hooks for Python only. A proxy over its autograd Engine
// offers them to C++: while a SavedTensorScope is active on a thread, everything that autograd
// saves there is handed to the scope's packer. The scope travels in c10::ThreadLocalDebugInfo,
// which autograd carries to its worker threads (a plain thread_local would not get there).
//
//   class KeepOnDevice : public SavedTensorPacker { ... };
//   SavedTensorScope scope(std::make_shared<KeepOnDevice>());
//
// Thread safety: scopes belong to a thread and nest; packers and saved tensors are called from any
// thread.
// Checked against LibTorch 2.11 (hooks/BUILD.bazel gets no other).

#ifndef PINION_HOOKS_SAVED_TENSOR_HOOKS_H_
#define PINION_HOOKS_SAVED_TENSOR_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace pinion {

// What a packer made of one saved tensor. Lives as long as its place in the graph.
class SavedTensor {
 public:
  virtual ~SavedTensor() = default;
  // The tensor: same sizes, strides, dtype, device and bytes. Called once per backward that needs
  // it, on whatever thread runs the node, with the node's stream current. May throw c10::Error.
  virtual at::Tensor Unpack() = 0;
};

class SavedTensorPacker {
 public:
  virtual ~SavedTensorPacker() = default;
  // `tensor` is the very tensor that is saved, with its history: keep DetachedAlias of it at most,
  // since the node's own output would keep the graph alive.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor) = 0;
};

class SavedTensorScope {
 public:
  // A null packer switches hooks off inside outer scopes.
  explicit SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer);
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

// The backward that the calling thread runs right now, by a number that never repeats; -1 outside.
int64_t CurrentBackward();

// A number that the tensors saved by one node share, on the thread that creates it. While it stays
// the same, the operator that saves them has not returned.
uint64_t CurrentNode();

// Autograd starts one worker thread per device when the first backward of the process runs, one on
// the CPU included, and none later. Starts those of devices that have come since, up to
// `device_count`; does nothing before that first backward. Not while a backward runs.
void StartBackwardWorkers(int device_count);

// Runs `callback` when the current backward has succeeded, on the thread that finishes it. One that
// throws destroys the callback instead. Only inside a backward.
void AtEndOfBackward(std::function<void()> callback);

}  // namespace pinion

#endif  // PINION_HOOKS_SAVED_TENSOR_HOOKS_H_
