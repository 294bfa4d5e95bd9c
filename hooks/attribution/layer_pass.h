// Starts one forward and backward pass whose results the caller waits for later, while the devices
// compute the next pass.
//
//   const std::shared_ptr<HostCopies> copies = session.NewCopies();
//   PendingLayers first = StartGradients(copies, forward, layers, {x}, target);
//   PendingLayers second = StartGradients(copies, forward, layers, {y}, target);
//   first.Wait();                              // while the devices compute the second one
//
// Passes that share `copies` share its bound on pending copies (host_copies.h). Otherwise they
// compute the same as AttributionSession::ComputeLayerGradientsAndEval and EvalLayers.
//
// Thread safety, errors: as for AttributionSession. CaptureSink is thread-safe if its callbacks
// are. GradientSlot is thread-safe, except that EndBackwardHere must be called before backward.
// PendingLayers has none.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

// Delivers all tensors of one attribution according to its options and callbacks.
class CaptureSink {
 public:
  CaptureSink(const LayerOptions& options, const LayerCallbacks& callbacks,
              std::shared_ptr<HostCopies> copies)
      : options(options), callbacks(callbacks), copies(std::move(copies)) {}

  // Starts the copy of `tensor` to the host, or keeps it on the device if the options say so.
  // Returns nullopt after Close.
  std::optional<HostCopy> Deliver(LayerPart part, const at::Tensor& tensor,
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
  GradientSlot(std::shared_ptr<const CaptureSink> sink, LayerPart part)
      : sink_(std::move(sink)), part_(part) {}

  // Marks the gradient as one that backward only computes for this slot.
  void EndBackwardHere() { ends_here_ = true; }
  // Delivers `gradient` and returns the gradient with which backward continues.
  at::Tensor Take(const at::Tensor& gradient);
  // Returns CaptureSink::NextNumber() at the capture, or 0 if no gradient arrived.
  uint64_t captured_as() const;
  // Blocks until delivery; undefined if no gradient arrived, and a clone unless `is_last`.
  at::Tensor Wait(bool is_last);

 private:
  const std::shared_ptr<const CaptureSink> sink_;
  const LayerPart part_;
  bool ends_here_ = false;

  mutable Mutex mu_;
  HostCopy delivery_ ABSL_GUARDED_BY(mu_);
  uint64_t captured_as_ ABSL_GUARDED_BY(mu_) = 0;
};

// One of a layer's tensors, on one device.
struct LayerPiece {
  uint64_t captured_as = 0;
  std::vector<int64_t> sizes;
  at::TensorOptions options;
  HostCopy activation;
  std::shared_ptr<GradientSlot> gradient;  // null: no gradient is requested
  at::Tensor zeros;                        // in place of a gradient that never arrived
};
using LayerPieces = std::vector<LayerPiece>;
using PiecesByDevice = std::map<int, LayerPieces>;  // -1: the CPU

// The captured tensors of one pass whose copies are pending. The devices' work is queued; the
// program's tensors and the graph are free.
class PendingLayers {
 public:
  // Takes `captured` by each name's first layer, after backward. If LayerOptions forbid unused
  // layers, throws c10::Error for a layer that did not run, or on which the output does not depend.
  PendingLayers(const std::vector<std::string>& layers, std::shared_ptr<const CaptureSink> sink,
                std::map<size_t, PiecesByDevice> captured);

  // Blocks until all copies are complete; returns results in the order of the layers. Call it once.
  std::vector<LayerResult> Wait();

 private:
  // Returns the pieces of all devices in the order of concatenation.
  std::vector<LayerPieces> InDeviceOrder(const std::string& layer, PiecesByDevice by_device) const;
  // Fills `zeros` where no gradient arrived.
  void MakeZeros(LayerPart part);
  LayerTensor Gather(LayerPart part);

  std::shared_ptr<const CaptureSink> sink_;
  std::vector<LayerResult> results_;  // without their tensors
  std::vector<size_t> first_of_name_;
  std::map<size_t, std::vector<LayerPieces>> devices_;    // by layer
  std::vector<std::pair<uint64_t, LayerPart>> arrivals_;  // in order of capture
};

// Returns the output of `forward`. c10::Error if `forward` is empty.
at::Tensor OutputOf(const AttributedForward& forward, const std::vector<at::Tensor>& inputs);

// Starts a pass with gradients. Wait of the result calls callbacks.on_arrival; the other callbacks
// are only called before this returns.
PendingLayers StartGradients(const std::shared_ptr<HostCopies>& copies,
                             const AttributedForward& forward,
                             const std::vector<std::string>& layers,
                             const std::vector<at::Tensor>& inputs, const Target& target,
                             const LayerOptions& options = {},
                             const LayerCallbacks& callbacks = {});

PendingLayers StartValues(const std::shared_ptr<HostCopies>& copies,
                          const AttributedForward& forward, const std::vector<std::string>& layers,
                          const std::vector<at::Tensor>& inputs, const LayerOptions& options = {},
                          const LayerCallbacks& callbacks = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_
