#include "pinion/hooks/attribution/tap.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/scope_mark.h"

namespace pinion {

struct OpenedTaps {
  ScopeMark mark{"TapScope"};
  TapListener* const listener;
  const std::shared_ptr<OpenedTaps> outer;       // null for the outermost
  const std::shared_ptr<const OpenedTaps> from;  // null unless another thread handed it over
  std::atomic<bool> is_open = true;
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

// The listener belongs to whoever opened the scope, and may end with it.
void CheckIsOpen(const OpenedTaps& from) {
  TORCH_CHECK(from.is_open.load(std::memory_order_acquire),
              "the TapScope that a TapHandover was made in has ended: join replicas before forward "
              "returns, and make a handover in each forward");
}

TapListener* Listener() {
  const OpenedTaps* const innermost = Innermost();
  if (innermost == nullptr) return nullptr;
  if (innermost->from != nullptr) CheckIsOpen(*innermost->from);
  return innermost->listener;
}

std::shared_ptr<OpenedTaps> Open(TapListener* listener,
                                 std::shared_ptr<const OpenedTaps> from = nullptr) {
  Innermost();
  t_innermost.reset(
      new OpenedTaps{.listener = listener, .outer = t_innermost, .from = std::move(from)});
  return t_innermost;
}

// Returns the scope that the calling thread taps for: its own, or the one that it was handed.
std::shared_ptr<const OpenedTaps> OpenedHere() {
  const OpenedTaps* const innermost = Innermost();
  if (innermost == nullptr || innermost->from == nullptr) return t_innermost;
  return innermost->from;
}

std::shared_ptr<OpenedTaps> OpenFrom(const std::shared_ptr<const OpenedTaps>& from) {
  if (from == nullptr) return Open(/*listener=*/nullptr);
  CheckIsOpen(*from);
  return Open(from->listener, from);
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

TapHandover::TapHandover() : from_(OpenedHere()) {}

TapScope::TapScope(TapListener* listener) : opened_(Open(listener)) {}
TapScope::TapScope(const TapHandover& handover)
    : state_(std::in_place, handover.state_), opened_(OpenFrom(handover.from_)) {}

TapScope::~TapScope() {
  opened_->is_open.store(false, std::memory_order_release);
  const OpenedTaps* const innermost = Innermost();
  opened_->mark.End(innermost == nullptr ? nullptr : &innermost->mark);
  Innermost();  // drops the ended scope
}

}  // namespace pinion
