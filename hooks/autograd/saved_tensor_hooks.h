// Saved-tensor hooks from C++: the one place that touches LibTorch's unstable internals.
//
// LibTorch keeps default saved-tensor hooks for Python only. A proxy over its autograd Engine
// offers them to C++: while a SavedTensorScope is active on a thread, everything that autograd
// saves there is handed to the scope's packer. The scope travels in c10::ThreadLocalDebugInfo,
// which autograd carries to its worker threads (a plain thread_local would not get there).
//
// Among scopes and the hooks of Python (torch.autograd.graph.saved_tensors_hooks, which activation
// checkpointing uses) the innermost wins. A profiler, which lives in the same ThreadLocalDebugInfo,
// may be started and stopped inside a scope or around it.
//
//   class KeepOnDevice : public SavedTensorPacker { ... };
//   SavedTensorScope scope(std::make_shared<KeepOnDevice>());
//
// A watcher stands between autograd and whatever packer there is, so that what a step saves and
// reads can be recorded without taking the packer's place: scopes inside and outside of a
// WatchScope stay what they are.
//
// Thread safety: scopes belong to a thread and nest; packers, watchers and saved tensors are called
// from any thread. A scope that ends out of order, or on another thread, is an error in the log
// (scope_mark.h); it packs and watches nothing from then on.
// Checked against LibTorch 2.11 (hooks/BUILD.bazel gets no other).

#ifndef PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_
#define PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "pinion/hooks/autograd/segment_part.h"

namespace pinion {

// A node of the graph, by the thread that created it and how many nodes that thread had created by
// then, this one included: autograd's sequence number of the node, plus one. Nodes that accumulate
// gradients have no number.
struct NodeId {
  std::thread::id thread;
  uint64_t sequence = 0;
};

// The youngest node of the calling thread.
NodeId CurrentNode();

// How many nodes the thread of `begin` had created from `begin` on to `node`, `node` included. A
// program that does the same in each of its steps gets the same numbers in each, where `begin` is
// CurrentNode() at the step's beginning. Nothing for a node of another thread: threads number
// theirs independently.
std::optional<uint64_t> NodesSince(const NodeId& begin, const NodeId& node);

// Where in the graph a tensor is saved, as far as hooks can know. LibTorch does not tell them: it
// is seen from the nodes that there are at that moment.
//
// An operator creates its node, saves its inputs, computes, and saves its outputs, so both fields
// are exact unless another node is created in between. Three cases are known: the forward of a
// custom Function builds a graph of its own; an operator writes in place to a view; an operator
// reads a view whose base was written in place since the view was made (LibTorch then gives the
// view a new node). The numbers are the same in each step there, too.
struct GraphPlace {
  // The youngest node of the thread, which is the node that saves the tensor. In each of the cases
  // above it may be the node that was created in between.
  NodeId node;
  // Whether `node` has computed the tensor. Otherwise the tensor is an input of `node`, or
  // something without history that the operator has computed on its way. In the first of the cases
  // above an output counts as an input, in the last one an input as an output.
  bool is_output = false;
};

// What a packer made of one saved tensor. Lives as long as its place in the graph.
class SavedTensor {
 public:
  virtual ~SavedTensor() = default;
  // The tensor: same sizes, strides, dtype, device and bytes. Called once per backward that needs
  // it, on whatever thread runs the node, with the node's stream current. May throw c10::Error.
  virtual at::Tensor Unpack() = 0;
  // Whether it leaves the device without a copy: a read computes it again where nobody has it any
  // more.
  virtual bool IsComputedAgain() const { return false; }
  // Whether the last Unpack did.
  virtual bool WasComputedAgain() const { return false; }
  // Who of the packer's holds the device memory that the tensor had when it was saved, by one
  // strong reference; the same for all who share that reference. Null: nobody, and nobody ever will
  // again. Any thread may ask, while another one unpacks, and holds locks of its own meanwhile: no
  // call of LibTorch or of a device, and nothing is let go of.
  virtual const void* MemoryOwner() const { return this; }
};

// A segment of forward that can be computed again from its inputs, some of which may be undefined.
// All that are not on the CPU are on `device`.
struct SegmentBegin {
  c10::Device device;
  absl::Span<const at::Tensor> inputs;
};

class SavedTensorPacker {
 public:
  virtual ~SavedTensorPacker() = default;
  // `tensor` is the very tensor that is saved, with its history: keep DetachedAlias of it at most,
  // since the node's own output would keep the graph alive.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) = 0;
  // A segment of forward that can be computed again begins on the calling thread. If the packer
  // wants what it saves, the segment's ordinal (SegmentPart::ordinal in segment_part.h). Nothing,
  // if the segment is to be computed again: then its inputs are saved next.
  virtual std::optional<uint32_t> KeepSegment(const SegmentBegin&) { return std::nullopt; }
  // In a KernelScope (kernel_scope.h): an operator has saved its arguments, and its kernel is next.
  // May throw.
  virtual void BeforeKernel(const c10::FunctionSchema&) {}
};

class SavedTensorWatcher {
 public:
  virtual ~SavedTensorWatcher() = default;
  // Packs `tensor` in the packer's place. `packer` is the innermost scope's; null where there is
  // none, or where it is switched off, and autograd would keep the tensor as it is.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                            SavedTensorPacker* packer) = 0;
  // The packer keeps the segment that begins, under that ordinal. It is inside of CurrentPart().
  virtual void OnSegmentKept(const SegmentBegin& segment, uint32_t ordinal) = 0;
  // Runs `work`, which is no part of what is watched, as what RunAside is given.
  virtual void RunAside(absl::FunctionRef<void()> work) = 0;
};

// What a scope has brought to its thread (open_scopes.h).
struct OpenedScope;

class [[nodiscard]] SavedTensorScope {
 public:
  // A null packer switches hooks off inside outer scopes. Where somebody has disabled hooks (as
  // torch.autograd.graph.disable_saved_tensors_hooks does), any other packer is refused with a
  // c10::Error that has that one's message. `name` is for messages.
  [[nodiscard]] explicit SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer,
                                          const char* name = "SavedTensorScope");
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  const std::shared_ptr<OpenedScope> opened_;
};

// While it lives, `watcher` packs what autograd saves on this thread. The innermost one watches.
// What the hooks of Python pack is not watched.
class [[nodiscard]] WatchScope {
 public:
  [[nodiscard]] explicit WatchScope(std::shared_ptr<SavedTensorWatcher> watcher,
                                    const char* name = "WatchScope");
  ~WatchScope();
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;

 private:
  const std::shared_ptr<OpenedScope> opened_;
};

// Of the innermost scope that the calling thread is in; null without one, or where it is switched
// off.
const SavedTensorPacker* CurrentPacker();

// The same, but null where LibTorch's own hooks lie inside of that scope, or hooks are disabled:
// then it packs nothing that is saved now.
const SavedTensorPacker* ActivePacker();

// The kept segment of `device` to which belongs what the calling thread saves: one to which the
// active packer has given its ordinal. What scopes within a segment pack is not the segment's.
std::optional<SegmentPart> CurrentPart(c10::Device device);

// SavedTensorPacker::KeepSegment of whoever packs on the calling thread; nothing where nobody does,
// LibTorch's own hooks do, or hooks are disabled.
std::optional<uint32_t> KeepSegment(const SegmentBegin& segment);

// SavedTensorPacker::BeforeKernel of the innermost scope's.
void BeforeKernel(const c10::FunctionSchema& op);

// Runs `work`, which packers do for tensors that they have packed before, and tells the innermost
// watcher that it is theirs: the end of a scope, for example. Watchers see what happens in Pack and
// in a saved tensor's functions by themselves.
void RunAside(absl::FunctionRef<void()> work);

// The backward that the calling thread runs right now, by a number that never repeats; -1 outside.
int64_t CurrentBackward();

// The node that the calling thread evaluates in it, by autograd's sequence number; 0 outside.
uint64_t CurrentBackwardNode();

// Whether code that LibTorch has not generated gets what the calling thread unpacks: a custom
// function's backward, a node of a program's own, or a segment that is recomputed. Such code may
// use a tensor's place in its storage, which LibTorch's own formulas do not.
bool IsReadByUserCode();

// While it lives, what the calling thread unpacks is for user code.
class [[nodiscard]] UserReadScope {
 public:
  [[nodiscard]] UserReadScope();
  ~UserReadScope();
  UserReadScope(const UserReadScope&) = delete;
  UserReadScope& operator=(const UserReadScope&) = delete;

 private:
  const bool outer_;
};

// Whether that backward was told to keep the graph (retain_graph, create_graph).
bool BackwardKeepsGraph();
// Whether the calling thread runs a backward that keeps the graph and makes another one, of its own
// operators (create_graph).
bool BackwardMakesGraph();

// Whether the operator that saved tensors for `node` has returned, as far as the thread of
// `current` can tell: it has once its thread creates another node. Until then the operator may
// still write what it has saved: LibTorch saves arguments before it calls the kernel, among them
// some that the kernel fills without raising a version (the noise of rrelu, running statistics).
bool HasReturned(const NodeId& node, const NodeId& current);

// Autograd starts one worker thread per device when the first backward of the process runs, one on
// the CPU included, and none later. Starts those of devices that have come since, up to
// `device_count`; does nothing before that first backward. Not while a backward runs.
void StartBackwardWorkers(int device_count);

// Runs `callback`, which must not throw, once when the current backward has ended, whether it has
// succeeded or thrown, on whatever thread that is. Only inside a backward.
void AtEndOfBackward(std::function<void()> callback);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_
