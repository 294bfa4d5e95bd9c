#include "pinion/hooks/autograd/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/library.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pinion/allocator/base/slab.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {
namespace {

// Returns the number of LibTorch's own (Python's) hooks on this thread. Hooks that were added after
// a scope was opened lie inside it.
size_t OwnHooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

}  // namespace

struct OpenedScope {
  OpenedScope(const char* name, bool is_watch, std::shared_ptr<SavedTensorPacker> p,
              std::shared_ptr<SavedTensorWatcher> w)
      : mark(name), watches(is_watch), packer(std::move(p)), watcher(std::move(w)) {}

  ScopeMark mark;
  const bool watches;  // true for a WatchScope, false for a SavedTensorScope
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks = OwnHooks();  // when the scope was opened
};

namespace {

// --- The stack of a thread's open scopes ---
//
// It lies in c10::ThreadLocalDebugInfo, which LibTorch carries to its worker threads.

// A scope and those around it. Immutable.
struct ScopeInfo final : public c10::DebugInfoBase, public std::enable_shared_from_this<ScopeInfo> {
  ScopeInfo(std::shared_ptr<OpenedScope> scope, std::shared_ptr<ScopeInfo> around)
      : opened(std::move(scope)),
        outer(std::move(around)),
        packer(!opened->watches   ? opened->packer
               : outer == nullptr ? nullptr
                                  : outer->packer),
        watcher(opened->watches    ? opened->watcher
                : outer == nullptr ? nullptr
                                   : outer->watcher),
        outer_hooks(!opened->watches   ? opened->outer_hooks
                    : outer == nullptr ? 0
                                       : outer->outer_hooks) {}

  const std::shared_ptr<OpenedScope> opened;
  const std::shared_ptr<ScopeInfo> outer;  // null for the outermost scope
  // The innermost packer with its outer_hooks, and the innermost watcher.
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks;
};

// No other library uses this slot: LibTorch reserves it for its own tests.
c10::DebugInfoKind ScopeSlot() { return c10::DebugInfoKind::TEST_INFO_2; }

ScopeInfo* ScopeInSlot() {
  return static_cast<ScopeInfo*>(c10::ThreadLocalDebugInfo::get(ScopeSlot()));
}

// Returns the kind of an entry of debug info. LibTorch has no accessor. Only an explicit
// instantiation may name a private field.
c10::DebugInfoKind KindOf(const c10::ThreadLocalDebugInfo& entry);
template <c10::DebugInfoKind c10::ThreadLocalDebugInfo::*kind>
struct KindField {
  friend c10::DebugInfoKind KindOf(const c10::ThreadLocalDebugInfo& entry) { return entry.*kind; }
};
template struct KindField<&c10::ThreadLocalDebugInfo::kind_>;

// Pops the newest entry of the thread's debug info, which must not be empty.
std::pair<c10::DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>> PopDebugInfo() {
  const c10::DebugInfoKind kind = KindOf(*c10::ThreadLocalDebugInfo::current());
  return {kind, c10::ThreadLocalDebugInfo::_pop(kind)};
}

// Replaces the scope in the slot; null empties it. The scope becomes the bottom entry, because
// programs push and pop other entries in any order relative to the scope.
void SetScope(std::shared_ptr<ScopeInfo> scope) {
  std::vector<std::pair<c10::DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>>> others;
  while (c10::ThreadLocalDebugInfo::current() != nullptr) {
    auto entry = PopDebugInfo();
    if (entry.first != ScopeSlot()) others.push_back(std::move(entry));
  }
  if (scope != nullptr) c10::ThreadLocalDebugInfo::_push(ScopeSlot(), std::move(scope));
  for (; !others.empty(); others.pop_back()) {
    c10::ThreadLocalDebugInfo::_push(others.back().first, std::move(others.back().second));
  }
}

// Returns `scope` without the ended scopes in its chain.
std::shared_ptr<ScopeInfo> OpenScopes(std::shared_ptr<ScopeInfo> scope) {
  if (scope == nullptr) return nullptr;
  std::shared_ptr<ScopeInfo> outer = OpenScopes(scope->outer);
  if (scope->opened->mark.HasEnded()) return outer;
  if (outer == scope->outer) return scope;
  return std::make_shared<ScopeInfo>(scope->opened, std::move(outer));
}

// Returns the innermost scope that has not ended, or null.
ScopeInfo* CurrentScope() {
  for (const ScopeInfo* scope = ScopeInSlot(); scope != nullptr; scope = scope->outer.get()) {
    if (!scope->opened->mark.HasEnded()) continue;
    SetScope(OpenScopes(ScopeInSlot()->shared_from_this()));
    break;
  }
  return ScopeInSlot();
}

void EndScope(OpenedScope& scope) {
  const ScopeInfo* const innermost = CurrentScope();
  scope.mark.End(innermost == nullptr ? nullptr : &innermost->opened->mark);
  CurrentScope();  // removes the ended scope
}

// --- Hooks ---

using torch::autograd::Engine;

thread_local std::optional<SegmentPart> current_part;  // the innermost scope's

thread_local bool is_user_read = false;

// False if hooks are disabled or torch.compile traces. Saves of a tracer do not belong to the
// program, and Python's hooks skip them as well.
bool HooksAreOn() {
  return at::SavedTensorDefaultHooks::is_enabled() &&
         !at::SavedTensorDefaultHooks::get_tls_state().is_tracing;
}

// Whether the scope's packer is active: no LibTorch hooks lie inside the scope.
bool Packs(const ScopeInfo& scope) {
  return scope.packer != nullptr && OwnHooks() <= scope.outer_hooks;
}

// Must be called while `tensor` is being saved on this thread.
GraphPlace PlaceOf(const at::Tensor& tensor) {
  GraphPlace place;
  place.node = CurrentNode();
  const NodePtr& made_by = tensor.grad_fn();
  // The thread is compared too: sequence numbers repeat between threads.
  place.is_output = made_by != nullptr && made_by->sequence_nr() + 1 == place.node.sequence &&
                    made_by->thread_id() == at::RecordFunction::currentThreadId();
  return place;
}

class Hooks final : public torch::autograd::SavedVariableHooks, public SlabObject<Hooks> {
 public:
  Hooks(std::shared_ptr<SavedTensorPacker> packer, std::shared_ptr<SavedTensorWatcher> watcher)
      : packer_(std::move(packer)), watcher_(std::move(watcher)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const GraphPlace place = PlaceOf(tensor);
    saved_ = watcher_ == nullptr ? packer_->Pack(tensor, place)
                                 : watcher_->Pack(tensor, place, packer_.get());
    packer_.reset();
    watcher_.reset();
  }

  at::Tensor call_unpack_hook() override { return saved_->Unpack(); }

 private:
  std::shared_ptr<SavedTensorPacker> packer_;    // null if the watcher keeps the tensor
  std::shared_ptr<SavedTensorWatcher> watcher_;  // null without a WatchScope
  std::unique_ptr<SavedTensor> saved_;
};

// Delegates to the previous default engine (LibTorch's or Python's), so that there remains one set
// of worker threads.
class ProxyEngine : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const BackwardScope observed;
    return ForwardingEngine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                     outputs);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const ScopeInfo* scope = CurrentScope();
    if (scope != nullptr && HooksAreOn()) {
      if (Packs(*scope) || (scope->watcher != nullptr && OwnHooks() == 0)) {
        return std::make_unique<Hooks>(scope->packer, scope->watcher);
      }
    }
    return ForwardingEngine::get_default_saved_variable_hooks();
  }
};

std::atomic<ProxyEngine*> the_proxy{nullptr};

// Called by each scope, since Python may replace the engine at any time, by loading torch. Proxies
// are leaked: static destructors may destroy graphs.
void InstallProxy() {
  const Engine* const proxy = the_proxy.load();  // before the engine: a race costs a second proxy
  Engine& engine = Engine::get_default_engine();
  if (&engine == proxy) return;
  the_proxy.store(new ProxyEngine(engine));
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *the_proxy.load(); });
}

std::shared_ptr<OpenedScope> Open(const char* name, bool watches,
                                  std::shared_ptr<SavedTensorPacker> packer,
                                  std::shared_ptr<SavedTensorWatcher> watcher) {
  const std::optional<std::string>& disabled =
      at::SavedTensorDefaultHooks::get_disabled_error_message();
  TORCH_CHECK(packer == nullptr || !disabled.has_value(), *disabled);
  InstallProxy();
  auto opened = std::make_shared<OpenedScope>(name, watches, std::move(packer), std::move(watcher));
  ScopeInfo* const outer = CurrentScope();
  SetScope(
      std::make_shared<ScopeInfo>(opened, outer == nullptr ? nullptr : outer->shared_from_this()));
  return opened;
}

// --- Kernels ---

// The key is below autograd, which has then saved the arguments, and above all kernels.
constexpr c10::DispatchKey kBeforeKernel = c10::DispatchKey::Fake;

void RunKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  BeforeKernel(op.schema());
  const c10::impl::ExcludeDispatchKeyGuard inside(kBeforeKernel);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kBeforeKernel),
                     stack);
}

void RegisterKernelFallback() {
  static const torch::Library* const library = [] {
    auto* all = new torch::Library(torch::Library::IMPL, "_", kBeforeKernel, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFromBoxedFunction<&RunKernel>());
    return all;
  }();
  static_cast<void>(library);
}

// Removes the exclusion as well, since a kernel may run a backward.
c10::impl::LocalDispatchKeySet WithKey() {
  RegisterKernelFallback();
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = keys.included_.add(kBeforeKernel);
  keys.excluded_ = keys.excluded_.remove(kBeforeKernel);
  return keys;
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer, const char* name)
    : opened_(Open(name, /*watches=*/false, std::move(packer), nullptr)) {}

SavedTensorScope::~SavedTensorScope() { EndScope(*opened_); }

WatchScope::WatchScope(std::shared_ptr<SavedTensorWatcher> watcher, const char* name)
    : opened_(Open(name, /*watches=*/true, nullptr, std::move(watcher))) {}

WatchScope::~WatchScope() { EndScope(*opened_); }

KernelScope::KernelScope() : keys_(WithKey()) {}

std::optional<uint32_t> KeepSegment(const SegmentBegin& segment) {
  if (ActivePacker() == nullptr) return std::nullopt;
  const ScopeInfo* scope = CurrentScope();
  // Copies of the pointers: the packer may open scopes.
  const std::shared_ptr<SavedTensorPacker> packer = scope->packer;
  const std::shared_ptr<SavedTensorWatcher> watcher = scope->watcher;
  const std::optional<uint32_t> kept = packer->KeepSegment(segment);
  if (kept.has_value() && watcher != nullptr) watcher->OnSegmentKept(segment, *kept);
  return kept;
}

const SavedTensorPacker* CurrentPacker() {
  const ScopeInfo* scope = CurrentScope();
  return scope == nullptr ? nullptr : scope->packer.get();
}

const SavedTensorPacker* ActivePacker() {
  const ScopeInfo* scope = CurrentScope();
  const bool packs = scope != nullptr && HooksAreOn() && Packs(*scope);
  return packs ? scope->packer.get() : nullptr;
}

std::optional<SegmentPart> CurrentPart(c10::Device device) {
  std::optional<SegmentPart> part = current_part;
  if (part.has_value() && (part->device != device || part->packer != ActivePacker())) part.reset();
  return part;
}

void BeforeKernel(const c10::FunctionSchema& op) {
  const ScopeInfo* scope = CurrentScope();
  if (scope != nullptr && scope->packer != nullptr) scope->packer->BeforeKernel(op);
}

void RunAside(absl::FunctionRef<void()> work) {
  const ScopeInfo* scope = CurrentScope();
  // A copy of the pointer: the work may open scopes.
  const std::shared_ptr<SavedTensorWatcher> watcher = scope == nullptr ? nullptr : scope->watcher;
  watcher == nullptr ? work() : watcher->RunAside(work);
}

int64_t CurrentBackward() { return torch::autograd::get_current_graph_task_id(); }

NodeId CurrentNode() { return {std::this_thread::get_id(), at::sequence_number::peek()}; }

std::optional<uint64_t> NodesSince(const NodeId& begin, const NodeId& node) {
  if (begin.thread != node.thread) return std::nullopt;
  return node.sequence - begin.sequence;
}

bool HasReturned(const NodeId& node, const NodeId& current) {
  return node.thread == current.thread && node.sequence != current.sequence;
}

uint64_t CurrentBackwardNode() {
  const NodePtr node = torch::autograd::get_current_node();
  return node == nullptr ? 0 : node->sequence_nr();
}

bool IsReadByUserCode() {
  if (is_user_read) return true;
  const NodePtr node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr;
}

SegmentPartScope::SegmentPartScope(const SegmentPart& part)
    : outer_(std::exchange(current_part, part)) {}

SegmentPartScope::~SegmentPartScope() { current_part = outer_; }

UserReadScope::UserReadScope() : outer_(std::exchange(is_user_read, true)) {}

UserReadScope::~UserReadScope() { is_user_read = outer_; }

bool BackwardKeepsGraph() { return torch::autograd::get_current_graph_task_keep_graph(); }

bool BackwardMakesGraph() {
  return CurrentBackward() != -1 && BackwardKeepsGraph() && c10::GradMode::is_enabled();
}

void AtEndOfBackward(std::function<void()> callback) {
  TORCH_CHECK(CurrentBackward() != -1, "AtEndOfBackward was called outside of a backward");
  // A backward that throws destroys its callbacks without running them.
  std::shared_ptr<void> end(nullptr, [callback = std::move(callback)](void*) { callback(); });
  Engine::get_default_engine().queue_callback([end = std::move(end)]() mutable { end.reset(); });
}

}  // namespace pinion
