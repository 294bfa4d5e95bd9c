// Tensors of layers on their way to whoever asked for them: to the host, or kept on the device.
//
// Thread safety: LayerWay is thread-safe as its callbacks are; GradientSlot is thread-safe but for
// EndBackwardHere, which is called before backward.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_DELIVERY_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_DELIVERY_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_options.h"

namespace pinion {

struct LayerDelivery {
  at::Tensor kept;  // on the device, or:
  HostCopy copy;
  at::Tensor Wait() const { return kept.defined() ? kept : copy.Wait(); }
};

// How the tensors of one attribution leave.
class LayerWay {
 public:
  LayerWay(const LayerOptions& options, const LayerCallbacks& callbacks,
           std::shared_ptr<HostCopies> copies)
      : options(options), callbacks(callbacks), copies(std::move(copies)) {}

  // Nothing once it is closed.
  std::optional<LayerDelivery> Deliver(LayerPart part, const at::Tensor& tensor,
                                       HostCopies::Source source) const;
  // Nothing leaves any more: waits for what other threads are delivering, since callbacks are the
  // caller's. After an error another device's backward may still be running.
  void Close();
  // 1 for the first value or gradient that is captured, then 2, ...
  uint64_t NextNumber() const { return ++captures_; }

  const LayerOptions options;
  const LayerCallbacks callbacks;
  const std::shared_ptr<HostCopies> copies;

 private:
  mutable std::atomic<uint64_t> captures_{0};

  mutable Mutex mu_;
  mutable CondVar delivered_;
  mutable int delivering_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_closed_ ABSL_GUARDED_BY(mu_) = false;
};

// Where the gradient of one place in the graph goes.
class GradientSlot {
 public:
  GradientSlot(std::shared_ptr<const LayerWay> way, LayerPart part)
      : way_(std::move(way)), part_(part) {}

  // Backward asks for this gradient by name and needs it for nothing else.
  void EndBackwardHere() { ends_here_ = true; }
  // What backward goes on with.
  at::Tensor Take(const at::Tensor& gradient);
  // LayerWay::NextNumber when it was captured; 0: there was none.
  uint64_t captured_as() const;
  // Undefined: there was none. For the last one who asks it has memory of its own.
  at::Tensor Wait(bool is_last);

 private:
  const std::shared_ptr<const LayerWay> way_;
  const LayerPart part_;
  bool ends_here_ = false;

  mutable Mutex mu_;
  LayerDelivery delivery_ ABSL_GUARDED_BY(mu_);
  uint64_t captured_as_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_DELIVERY_H_
