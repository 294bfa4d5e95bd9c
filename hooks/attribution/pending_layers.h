// The captured tensors of one forward and backward pass whose copies are pending. The devices' work
// is queued; the program's tensors and the graph are free.
//
//   PendingLayers pending = capture.Finish();
//   ... more work for the devices ...
//   std::vector<LayerResult> layers = pending.Wait();
//
// Thread safety: none.

#ifndef PINION_HOOKS_ATTRIBUTION_PENDING_LAYERS_H_
#define PINION_HOOKS_ATTRIBUTION_PENDING_LAYERS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pinion/hooks/attribution/layer_delivery.h"
#include "pinion/hooks/attribution/layer_options.h"

namespace pinion {

// One of a layer's tensors, on one device.
struct LayerPiece {
  uint64_t captured_as = 0;
  std::vector<int64_t> sizes;
  at::TensorOptions options;
  LayerDelivery activation;
  std::shared_ptr<GradientSlot> gradient;  // null: no gradient is requested
  at::Tensor zeros;                        // in place of a gradient that never arrived
};
using LayerPieces = std::vector<LayerPiece>;
using PiecesByDevice = std::map<int, LayerPieces>;  // -1: the CPU

class PendingLayers {
 public:
  // Takes `captured` by each name's first layer, after backward. If LayerOptions forbid unused
  // layers, throws c10::Error for a layer that did not run, or on which the output does not depend.
  PendingLayers(const std::vector<std::string>& layers, std::shared_ptr<const LayerWay> way,
                std::map<size_t, PiecesByDevice> captured);

  // Blocks until all copies are complete; returns results in the order of the layers. Call it once.
  std::vector<LayerResult> Wait();

 private:
  // Returns the pieces of all devices in the order of concatenation.
  std::vector<LayerPieces> InDeviceOrder(const std::string& layer, PiecesByDevice by_device) const;
  // Fills `zeros` where no gradient arrived.
  void MakeZeros(LayerPart part);
  LayerTensor Gather(LayerPart part);
  at::Tensor Join(const std::vector<at::Tensor>& pieces) const;

  std::shared_ptr<const LayerWay> way_;
  std::vector<LayerResult> results_;  // without their tensors
  std::vector<size_t> first_of_name_;
  std::map<size_t, std::vector<LayerPieces>> devices_;    // by layer
  std::vector<std::pair<uint64_t, LayerPart>> arrivals_;  // in order of capture
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PENDING_LAYERS_H_
