// Names for values inside of a model, so that attribution can look at them: C++ modules have no
// forward hooks.
//
//   at::Tensor Net::forward(at::Tensor x) {
//     x = pinion::Tap("conv1", conv1_->forward(x));   // go on with what it returns
//     ...
//
// Outside of an attribution, or where nobody asks for the name, a tap returns its argument and
// costs the look at a thread-local variable. The model goes on with what the tap returns, which has
// the same values, and may change it in place. Where somebody asks, that may be another tensor, on
// the same stream: a tap is work on the current stream of the tensor's device, so what is to order
// other streams behind the value (an event, record_stream) is recorded behind the tap, on what it
// returns.
//
// Errors: c10::Error as a copy that fails has it, c10::OutOfMemoryError where the host or the
// device has no room. A tensor that was given away is gone then.
//
// Thread safety: a tap is seen by who listens on its own thread. A TapScope that ends out of order,
// or on another thread, is an error in the log, and hears of no tap from then on. Replicas that run
// on threads of their own are heard if each thread goes on listening for the one that began it:
//
//   const pinion::TapHandover handover;
//   std::thread replica([&] {
//     const pinion::TapScope taps(handover);
//     outputs[1] = replicas[1]->forward(parts[1]);
//   });
//   ...
//   replica.join();                                 // before the forward function returns

#ifndef PINION_HOOKS_ATTRIBUTION_TAP_H_
#define PINION_HOOKS_ATTRIBUTION_TAP_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace pinion {

// A tensor that the model does not keep is best given away, as above or by std::move: if it
// has no history, the copy to the host reads it at once, and nothing waits for a copy on the
// device.
at::Tensor Tap(std::string_view name, at::Tensor tensor);
// A layer whose value is several tensors: none is an error (c10::Error) where somebody asks for it.
std::vector<at::Tensor> Tap(std::string_view name, std::vector<at::Tensor> tensors);

// Who is told of taps, on several threads at a time where they share it.
class TapListener {
 public:
  virtual ~TapListener() = default;
  // What the model goes on with: as many as there were.
  virtual std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) = 0;
};

// What a thread hands to those that run replicas for it: who listens to its taps, and LibTorch's
// thread-local state (whether gradients are recorded, autocast, who observes memory).
class TapHandover {
 public:
  TapHandover();  // of the calling thread

 private:
  friend class TapScope;
  TapListener* const listener_;
  const at::ThreadLocalState state_;
};

// An open scope, and those around it (tap.cc).
struct OpenedTaps;

// While it lives, taps of this thread go to `listener` alone. Nests.
class [[nodiscard]] TapScope {
 public:
  [[nodiscard]] explicit TapScope(TapListener* listener);
  // This thread stands in for the one that made `handover`.
  [[nodiscard]] explicit TapScope(const TapHandover& handover);
  ~TapScope();
  TapScope(const TapScope&) = delete;
  TapScope& operator=(const TapScope&) = delete;

 private:
  std::optional<at::ThreadLocalStateGuard> state_;
  const std::shared_ptr<OpenedTaps> opened_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_TAP_H_
