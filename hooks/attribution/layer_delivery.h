// Delivers captured layer tensors to the host, or keeps them on the device if the options say so.
//
// Thread safety: LayerWay is thread-safe if its callbacks are. GradientSlot is thread-safe, except
// that EndBackwardHere must be called before backward.

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
  at::Tensor kept;  // on the device; undefined if `copy` has the tensor
  HostCopy copy;
  at::Tensor Wait() const { return kept.defined() ? kept : copy.Wait(); }
};

// Delivers all tensors of one attribution according to its options and callbacks.
class LayerWay {
 public:
  LayerWay(const LayerOptions& options, const LayerCallbacks& callbacks,
           std::shared_ptr<HostCopies> copies)
      : options(options), callbacks(callbacks), copies(std::move(copies)) {}

  // Starts the delivery of `tensor`. Returns nullopt after Close.
  std::optional<LayerDelivery> Deliver(LayerPart part, const at::Tensor& tensor,
                                       HostCopies::Source source) const;
  // Stops deliveries and blocks until those on other threads have ended. The callbacks belong to
  // the caller, and after an error another device's backward may still run.
  void Close();
  // Returns 1 for the first captured value or gradient, then 2, and so on.
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

// Receives the gradient of one place in the graph.
class GradientSlot {
 public:
  GradientSlot(std::shared_ptr<const LayerWay> way, LayerPart part)
      : way_(std::move(way)), part_(part) {}

  // Marks the gradient as one that backward only computes for this slot.
  void EndBackwardHere() { ends_here_ = true; }
  // Delivers `gradient` and returns the gradient with which backward continues.
  at::Tensor Take(const at::Tensor& gradient);
  // Returns LayerWay::NextNumber() at the capture, or 0 if no gradient arrived.
  uint64_t captured_as() const;
  // Blocks until delivery; undefined if no gradient arrived, and a clone unless `is_last`.
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
