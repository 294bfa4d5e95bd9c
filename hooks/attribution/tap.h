// Names values inside a model, so that attribution can capture them: C++ modules have no forward
// hooks.
//
//   at::Tensor Net::forward(at::Tensor x) {
//     x = pinion::Tap("conv1", conv1_->forward(x));   // go on with what it returns
//     ...
//
// Without a listener for the name, a tap returns its argument; its cost is one thread-local read.
// The model must continue with the returned tensor, which has the same values and may be changed in
// place. With a listener it may be another tensor on the same stream. A tap is work on the current
// stream of the tensor's device: record events and call record_stream after the tap, on the
// returned tensor.
//
// Errors: c10::Error when a copy fails, c10::OutOfMemoryError when the host or the device is full.
// A tensor that was moved into a failing tap is lost.
//
// Thread safety: a listener sees the taps of its own thread. A TapScope that ends out of order or
// on another thread logs an error and sees no later tap. For replicas on other threads, hand the
// listener over:
//
//   const pinion::TapHandover handover;
//   std::thread replica([&] {
//     const pinion::TapScope taps(handover);
//     outputs[1] = replicas[1]->forward(parts[1]);
//   });
//   ...
//   replica.join();                                 // before the forward function returns
//
// A handover ends with the TapScope that it was made in. Replicas throw c10::Error if they open it,
// or tap with it, after that.

#ifndef PINION_HOOKS_ATTRIBUTION_TAP_H_
#define PINION_HOOKS_ATTRIBUTION_TAP_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace pinion {

// Taps one tensor. Move the tensor in if the model does not keep it: without history, the copy to
// the host then reads it directly, without a copy on the device.
at::Tensor Tap(std::string_view name, at::Tensor tensor);
// Taps a layer of several tensors. c10::Error for no tensors if a listener wants the name.
std::vector<at::Tensor> Tap(std::string_view name, std::vector<at::Tensor> tensors);

// Listens to taps; several threads may call a shared listener at once.
class TapListener {
 public:
  virtual ~TapListener() = default;
  // Returns the tensors with which the model continues, as many as it got.
  virtual std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) = 0;
};

// An open scope and the scopes around it (tap.cc).
struct OpenedTaps;

// Captures a thread's tap listener and LibTorch's thread-local state (grad mode, autocast, memory
// observers) for threads that run replicas.
class TapHandover {
 public:
  TapHandover();  // of the calling thread

 private:
  friend class TapScope;
  const std::shared_ptr<const OpenedTaps> from_;  // null outside of any scope
  const at::ThreadLocalState state_;
};

// Sends the taps of this thread to `listener` alone, for the scope's lifetime. Nests.
class [[nodiscard]] TapScope {
 public:
  [[nodiscard]] explicit TapScope(TapListener* listener);
  // Makes this thread act for the thread that created `handover`. c10::Error if the handover's
  // scope has ended.
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
