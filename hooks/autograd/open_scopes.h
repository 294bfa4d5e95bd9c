// The stack of open SavedTensorScopes and WatchScopes of a thread. For saved_tensor_hooks.cc alone.
//
// The stack lies in c10::ThreadLocalDebugInfo, which LibTorch carries to its worker threads.
//
// Thread safety: functions act on the calling thread; returned objects are immutable.

#ifndef PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_
#define PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <memory>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {

// Returns the number of LibTorch's own (Python's) hooks on this thread. Hooks that were added after
// a scope was opened lie inside it.
size_t OwnHooks();

// One open scope.
struct OpenedScope {
  OpenedScope(const char* name, bool is_watch, std::shared_ptr<SavedTensorPacker> p,
              std::shared_ptr<SavedTensorWatcher> w);

  ScopeMark mark;
  const bool watches;  // true for a WatchScope, false for a SavedTensorScope
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks;  // OwnHooks() when the scope was opened
};

// A scope and those around it.
struct ScopeInfo final : public c10::DebugInfoBase, public std::enable_shared_from_this<ScopeInfo> {
  ScopeInfo(std::shared_ptr<OpenedScope> scope, std::shared_ptr<ScopeInfo> around);

  const std::shared_ptr<OpenedScope> opened;
  const std::shared_ptr<ScopeInfo> outer;  // null for the outermost scope
  // The innermost packer with its outer_hooks, and the innermost watcher.
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks;
};

// Returns the innermost scope that has not ended, or null.
ScopeInfo* CurrentScope();

// Opens a scope with `watcher` if `watches`, else with `packer`. Either may be null.
std::shared_ptr<OpenedScope> OpenScope(const char* name, bool watches,
                                       std::shared_ptr<SavedTensorPacker> packer,
                                       std::shared_ptr<SavedTensorWatcher> watcher);
void EndScope(OpenedScope& scope);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_
