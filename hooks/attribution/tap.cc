#include "pinion/hooks/attribution/tap.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {

struct OpenedTaps {
  ScopeMark mark{"TapScope"};
  TapListener* const listener;
  const std::shared_ptr<OpenedTaps> outer;  // null for the outermost
};

namespace {

thread_local std::shared_ptr<OpenedTaps> t_innermost;

// Returns null without an open scope.
OpenedTaps* Innermost() {
  while (t_innermost != nullptr && t_innermost->mark.HasEnded()) {
    t_innermost = std::shared_ptr<OpenedTaps>(t_innermost->outer);
  }
  return t_innermost.get();
}

TapListener* Listener() {
  const OpenedTaps* const innermost = Innermost();
  return innermost == nullptr ? nullptr : innermost->listener;
}

std::shared_ptr<OpenedTaps> Open(TapListener* listener) {
  Innermost();
  t_innermost.reset(new OpenedTaps{.listener = listener, .outer = t_innermost});
  return t_innermost;
}

}  // namespace

at::Tensor Tap(std::string_view name, at::Tensor tensor) {
  if (Listener() == nullptr) return tensor;
  std::vector<at::Tensor> tensors;
  tensors.push_back(std::move(tensor));
  return std::move(Tap(name, std::move(tensors)).front());
}

std::vector<at::Tensor> Tap(std::string_view name, std::vector<at::Tensor> tensors) {
  TapListener* const listener = Listener();
  if (listener == nullptr) return tensors;
  const size_t count = tensors.size();
  std::vector<at::Tensor> passed = listener->OnTap(name, std::move(tensors));
  TORCH_CHECK(passed.size() == count, "Tap(\"", name, "\"): the TapListener returned ",
              passed.size(), " tensors for ", count, ": return as many as it was given");
  return passed;
}

TapHandover::TapHandover() : listener_(Listener()) {}

TapScope::TapScope(TapListener* listener) : opened_(Open(listener)) {}
TapScope::TapScope(const TapHandover& handover)
    : state_(std::in_place, handover.state_), opened_(Open(handover.listener_)) {}

TapScope::~TapScope() {
  const OpenedTaps* const innermost = Innermost();
  opened_->mark.End(innermost == nullptr ? nullptr : &innermost->mark);
  Innermost();  // drops the ended scope
}

}  // namespace pinion
