#include "pinion/hooks/autograd/open_scopes.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace pinion {
namespace {

// No other library uses this slot: LibTorch reserves it for its own tests.
constexpr c10::DebugInfoKind kScopeSlot = c10::DebugInfoKind::TEST_INFO_2;

ScopeInfo* ScopeInSlot() {
  return static_cast<ScopeInfo*>(c10::ThreadLocalDebugInfo::get(kScopeSlot));
}

// Pops the newest entry of the thread's debug info, which must not be empty.
std::pair<c10::DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>> PopDebugInfo() {
  for (auto number = static_cast<int>(c10::DebugInfoKind::TEST_INFO_2); number >= 0; --number) {
    const auto kind = static_cast<c10::DebugInfoKind>(number);
    // LibTorch cannot tell the kind of the newest entry.
    if (kind == kScopeSlot || c10::ThreadLocalDebugInfo::get(kind) == nullptr) continue;
    try {
      return {kind, c10::ThreadLocalDebugInfo::_pop(kind)};
    } catch (const c10::Error&) {
    }
  }
  return {kScopeSlot, c10::ThreadLocalDebugInfo::_pop(kScopeSlot)};
}

// Replaces the scope in the slot; null empties it. The scope becomes the bottom entry, because
// programs push and pop other entries in any order relative to the scope.
void SetScope(std::shared_ptr<ScopeInfo> scope) {
  std::vector<std::pair<c10::DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>>> others;
  while (c10::ThreadLocalDebugInfo::current() != nullptr) {
    auto entry = PopDebugInfo();
    if (entry.first != kScopeSlot) others.push_back(std::move(entry));
  }
  if (scope != nullptr) c10::ThreadLocalDebugInfo::_push(kScopeSlot, std::move(scope));
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

}  // namespace

size_t OwnHooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

OpenedScope::OpenedScope(const char* name, bool is_watch, std::shared_ptr<SavedTensorPacker> p,
                         std::shared_ptr<SavedTensorWatcher> w)
    : mark(name),
      watches(is_watch),
      packer(std::move(p)),
      watcher(std::move(w)),
      outer_hooks(OwnHooks()) {}

ScopeInfo::ScopeInfo(std::shared_ptr<OpenedScope> scope, std::shared_ptr<ScopeInfo> around)
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

ScopeInfo* CurrentScope() {
  for (const ScopeInfo* scope = ScopeInSlot(); scope != nullptr; scope = scope->outer.get()) {
    if (!scope->opened->mark.HasEnded()) continue;
    SetScope(OpenScopes(ScopeInSlot()->shared_from_this()));
    break;
  }
  return ScopeInSlot();
}

std::shared_ptr<OpenedScope> OpenScope(const char* name, bool watches,
                                       std::shared_ptr<SavedTensorPacker> packer,
                                       std::shared_ptr<SavedTensorWatcher> watcher) {
  auto opened = std::make_shared<OpenedScope>(name, watches, std::move(packer), std::move(watcher));
  ScopeInfo* const outer = CurrentScope();
  SetScope(
      std::make_shared<ScopeInfo>(opened, outer == nullptr ? nullptr : outer->shared_from_this()));
  return opened;
}

void EndScope(OpenedScope& scope) {
  const ScopeInfo* const innermost = CurrentScope();
  scope.mark.End(innermost == nullptr ? nullptr : &innermost->opened->mark);
  CurrentScope();  // removes the ended scope
}

}  // namespace pinion
