#include "pinion/hooks/attribution/tap.h"

#include <utility>

namespace pinion {
namespace {

thread_local TapListener* t_listener = nullptr;

}  // namespace

at::Tensor Tap(std::string_view name, at::Tensor tensor) {
  if (t_listener == nullptr) return tensor;
  std::vector<at::Tensor> tensors;
  tensors.push_back(std::move(tensor));
  return std::move(t_listener->OnTap(name, std::move(tensors)).front());
}

std::vector<at::Tensor> Tap(std::string_view name, std::vector<at::Tensor> tensors) {
  if (t_listener == nullptr) return tensors;
  return t_listener->OnTap(name, std::move(tensors));
}

TapHandover::TapHandover() : listener_(t_listener) {}

TapScope::TapScope(TapListener* listener) : previous_(std::exchange(t_listener, listener)) {}
TapScope::TapScope(const TapHandover& handover)
    : state_(std::in_place, handover.state_),
      previous_(std::exchange(t_listener, handover.listener_)) {}

TapScope::~TapScope() { t_listener = previous_; }

}  // namespace pinion
