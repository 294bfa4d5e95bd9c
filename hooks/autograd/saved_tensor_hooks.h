// Runs C++ code on each tensor that autograd saves for backward, and again when backward reads it:
// torch.autograd.graph.saved_tensors_hooks for C++.
//
//   class KeepOnDevice : public SavedTensorPacker { ... };
//   SavedTensorScope scope(std::make_shared<KeepOnDevice>());
//
// LibTorch offers default hooks to Python alone. A proxy over its autograd Engine offers them to
// C++. No other file that runs on a GPU touches LibTorch's unstable internals. Compiles for the
// releases that libtorch_compat.h names.
//
// The innermost of all scopes and Python hooks packs. A profiler may start and stop inside a scope
// or around it. A WatchScope records what a step saves and reads without replacing the packer.
//
// Thread safety: scopes belong to one thread and nest; LibTorch carries them to its worker threads.
// Packers, watchers and saved tensors are called from any thread. A scope that ends out of order,
// or on another thread, logs an error (scope_mark.h) and has no effect from then on.

#ifndef PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_
#define PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace pinion {

// Identifies a node of the graph: its thread, and autograd's sequence number plus one. That is how
// many nodes the thread has created, this node included. Nodes that accumulate gradients have no
// number.
struct NodeId {
  std::thread::id thread;
  uint64_t sequence = 0;
};

// Returns the newest node of the calling thread.
NodeId CurrentNode();

// Returns how many nodes were created after `begin`, up to and including `node`. With `begin` as
// CurrentNode() at a step's start, a program that repeats its steps gets the same numbers in each.
// Returns nothing if the nodes have different threads, since each thread counts its own.
std::optional<uint64_t> NodesSince(const NodeId& begin, const NodeId& node);

// Where in the graph a tensor is saved. LibTorch does not tell hooks, so this is deduced from the
// newest node.
//
// An operator creates its node, saves its inputs, computes, and saves its outputs. Both fields are
// therefore exact unless another node is created in between, which happens in three known cases:
//   (1) a custom Function builds a graph in its forward;
//   (2) an operator writes in place to a view;
//   (3) an operator reads a view whose base was written in place after the view was made, so that
//       LibTorch gives the view a new node.
// Repeated steps give the same numbers in these cases too.
struct GraphPlace {
  // The thread's newest node: the node that saves the tensor, or in cases 1 to 3 possibly the node
  // that was created in between.
  NodeId node;
  // Whether `node` computed the tensor. Otherwise the tensor is an input of `node`, or an
  // intermediate result without history. In case 1 an output counts as an input, in case 3 an
  // input as an output.
  bool is_output = false;
};

// One saved tensor in a packer's own form. Lives as long as its place in the graph.
class SavedTensor {
 public:
  virtual ~SavedTensor() = default;
  // Returns a tensor with the same sizes, strides, dtype, device and bytes. Called once per
  // backward that needs the tensor, on any thread, with the node's stream current. May throw
  // c10::Error.
  virtual at::Tensor Unpack() = 0;
  // Returns whether the tensor has no memory, since the program recomputes it when it is read (a
  // checkpoint's). Step recordings leave it out, and count work during its Unpack as work of the
  // step.
  virtual bool IsPlaceholder() const { return false; }
  // Returns whether the tensor can be evicted without a copy, since Unpack recomputes it if needed.
  virtual bool IsComputedAgain() const { return false; }
  // Returns whether the last Unpack recomputed the tensor.
  virtual bool WasComputedAgain() const { return false; }
  // Returns which object of the packer owns the device memory that the tensor had when it was
  // saved: the same one for all saved tensors that share a strong reference. Null means that no
  // object owns the memory or ever will. Any thread may call this, also during Unpack and under
  // locks of its own: must not call LibTorch or a device, and must not release anything.
  virtual const void* MemoryOwner() const { return this; }
};

// Keeps a saved tensor on the device, as autograd does without hooks.
//
//   std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
//     return KeepTensor(tensor);
//   }
//
// Unpack returns the tensor without its history. It throws autograd's own error if the tensor was
// changed in place after it was saved. Memory that has other users is aliased (lent_tensors.h).
std::unique_ptr<SavedTensor> KeepTensor(const at::Tensor& tensor);

// A segment of forward that can be recomputed from its inputs. Inputs may be undefined; all others
// are on `device` or on the CPU.
struct SegmentBegin {
  c10::Device device;
  absl::Span<const at::Tensor> inputs;
};

// A kept checkpoint segment (SavedTensorPacker::KeepSegment).
struct SegmentPart {
  c10::Device device;    // tensors on other devices belong to no segment
  uint32_t ordinal = 0;  // among the step's segments on that device
  // The packer that numbered the segment; only its address is used.
  const void* packer = nullptr;
};

// Declares that the calling thread runs the segment. LibTorch does not carry that to other threads.
//
//   const SegmentPartScope part({.device = device, .ordinal = ordinal});
//   ... the segment runs ...
class [[nodiscard]] SegmentPartScope {
 public:
  [[nodiscard]] explicit SegmentPartScope(const SegmentPart& part);
  ~SegmentPartScope();
  SegmentPartScope(const SegmentPartScope&) = delete;
  SegmentPartScope& operator=(const SegmentPartScope&) = delete;

 private:
  const std::optional<SegmentPart> outer_;
};

class SavedTensorPacker {
 public:
  virtual ~SavedTensorPacker() = default;
  // Packs `tensor`, which has its history. Store at most DetachedAlias(tensor): storing a node's
  // own output would keep the graph alive.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) = 0;
  // Called when a recomputable segment of forward begins on this thread. Returns the segment's
  // ordinal (SegmentPart::ordinal) if the packer packs what the segment saves. Returns nothing if
  // the segment is to be recomputed; its inputs are saved next.
  virtual std::optional<uint32_t> KeepSegment(const SegmentBegin&) { return std::nullopt; }
  // Called in a KernelScope before an operator's kernel, after the operator has
  // saved its inputs. May throw.
  virtual void BeforeKernel(const c10::FunctionSchema&) {}
};

class SavedTensorWatcher {
 public:
  virtual ~SavedTensorWatcher() = default;
  // Packs `tensor` instead of the packer. `packer` is the innermost scope's; null if there is none
  // or it is switched off, so that autograd would keep the tensor itself.
  virtual std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                            SavedTensorPacker* packer) = 0;
  // Reports that the packer keeps the segment that begins. CurrentPart() is the enclosing segment.
  virtual void OnSegmentKept(const SegmentBegin& segment, uint32_t ordinal) = 0;
  // Runs `work` and excludes it from the recording, as the function RunAside below describes.
  virtual void RunAside(absl::FunctionRef<void()> work) = 0;
};

// The state of an open scope.
struct OpenedScope;

class [[nodiscard]] SavedTensorScope {
 public:
  // Makes `packer` pack what autograd saves on this thread; null switches outer scopes off. If
  // hooks are disabled (torch.autograd.graph.disable_saved_tensors_hooks) and `packer` is not null,
  // throws c10::Error with the message given there. `name` is for messages.
  [[nodiscard]] explicit SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer,
                                          const char* name = "SavedTensorScope");
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  const std::shared_ptr<OpenedScope> opened_;
};

// Makes `watcher` pack what autograd saves on this thread, except what Python's hooks pack. The
// innermost scope watches.
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

// Calls SavedTensorPacker::BeforeKernel of the innermost SavedTensorScope before each operator's
// kernel on this thread, after autograd has saved the operator's inputs. Exception: operators that
// a kernel calls. LibTorch carries the scope to the threads of a backward that this thread runs.
//
//   const SavedTensorScope packs(std::make_shared<Stops>());
//   const KernelScope scope;
//   function();  // if BeforeKernel throws, as if that kernel had failed
//
// Stop a function here rather than in Pack: a custom function whose Pack throws keeps a reference
// to itself and leaks. LibTorch expects that any kernel may throw.
//
// The scope uses DispatchKey::Fake, which LibTorch reserves for fake tensors of C++: a process that
// has a kernel of theirs cannot use both. LibTorch itself has none.
class [[nodiscard]] KernelScope {
 public:
  [[nodiscard]] KernelScope();

 private:
  const c10::impl::ForceDispatchKeyGuard keys_;
};

// Returns the packer of the innermost scope; null without a scope, or if the scope switches hooks
// off.
const SavedTensorPacker* CurrentPacker();

// Returns CurrentPacker() if it packs what is saved now. Returns null if LibTorch's own hooks lie
// inside the packer's scope, or hooks are disabled.
const SavedTensorPacker* ActivePacker();

// Returns the kept segment of `device` to which tensors saved now on this thread belong. The active
// packer must have numbered it: tensors that an inner scope packs do not belong to the segment.
std::optional<SegmentPart> CurrentPart(c10::Device device);

// Asks the active packer whether to keep a segment (SavedTensorPacker::KeepSegment) and informs the
// watcher. Returns nothing without an active packer.
std::optional<uint32_t> KeepSegment(const SegmentBegin& segment);

// Calls BeforeKernel of the innermost scope's packer.
void BeforeKernel(const c10::FunctionSchema& op);

// Runs a packer's own work, such as the end of a scope, and excludes it from recordings of the
// innermost watcher. Not needed in Pack and in a saved tensor's functions, which watchers see.
void RunAside(absl::FunctionRef<void()> work);

// Returns the id of the backward that the calling thread runs, unique in the process; -1 outside.
int64_t CurrentBackward();

// Returns autograd's sequence number of the node that the calling thread evaluates; 0 outside.
uint64_t CurrentBackwardNode();

// Returns whether code that LibTorch did not generate reads what this thread unpacks: a custom
// function's backward, a program's own node, or a recomputed segment. Such code may use a tensor's
// storage offset; LibTorch's own formulas do not.
bool IsReadByUserCode();

// Declares that user code reads what this thread unpacks.
class [[nodiscard]] UserReadScope {
 public:
  [[nodiscard]] UserReadScope();
  ~UserReadScope();
  UserReadScope(const UserReadScope&) = delete;
  UserReadScope& operator=(const UserReadScope&) = delete;

 private:
  const bool outer_;
};

// Returns whether the current backward retains its graph (retain_graph, create_graph).
bool BackwardKeepsGraph();
// Returns whether the calling thread's backward keeps its graph and builds another one
// (create_graph).
bool BackwardMakesGraph();

// Returns whether the operator that saved tensors for `node` is known to have returned. This is
// known once the operator's thread, which must be that of `current`, creates the next node. Until
// then the kernel may write saved arguments without raising a version (the noise of rrelu, running
// statistics).
bool HasReturned(const NodeId& node, const NodeId& current);

// Runs `callback` once when the current backward has succeeded or thrown, on any thread. `callback`
// must not throw. Throws c10::Error outside of a backward.
void AtEndOfBackward(std::function<void()> callback);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_SAVED_TENSOR_HOOKS_H_
