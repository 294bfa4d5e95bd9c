// The scopes that are open on a thread: who packs what autograd saves there, and who watches it.
// For saved_tensor_hooks.cc alone.
//
// They are in the thread's c10::ThreadLocalDebugInfo, which LibTorch carries to its worker threads.
//
// Thread safety: functions of the calling thread; what they return is immutable.

#ifndef PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_
#define PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <memory>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {

// LibTorch's own hooks on this thread. Those that were added since a scope was opened lie inside
// it.
size_t OwnHooks();

// What one scope has brought.
struct OpenedScope {
  OpenedScope(const char* name, bool is_watch, std::shared_ptr<SavedTensorPacker> p,
              std::shared_ptr<SavedTensorWatcher> w);

  ScopeMark mark;
  const bool watches;  // or else it packs
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks;  // OwnHooks() around it
};

// A scope among those around it.
struct ScopeInfo final : public c10::DebugInfoBase, public std::enable_shared_from_this<ScopeInfo> {
  ScopeInfo(std::shared_ptr<OpenedScope> scope, std::shared_ptr<ScopeInfo> around);

  const std::shared_ptr<OpenedScope> opened;
  const std::shared_ptr<ScopeInfo> outer;  // null without one
  // Of the innermost scope that packs, and of the one that watches.
  const std::shared_ptr<SavedTensorPacker> packer;
  const std::shared_ptr<SavedTensorWatcher> watcher;
  const size_t outer_hooks;
};

// The innermost one; null without one.
ScopeInfo* CurrentScope();

// `watches`: with `watcher`, or else with `packer`; either may be null.
std::shared_ptr<OpenedScope> OpenScope(const char* name, bool watches,
                                       std::shared_ptr<SavedTensorPacker> packer,
                                       std::shared_ptr<SavedTensorWatcher> watcher);
void EndScope(OpenedScope& scope);

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_OPEN_SCOPES_H_
