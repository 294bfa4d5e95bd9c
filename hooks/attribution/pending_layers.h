// What one forward and backward have captured of the layers, while it is on its way: the devices'
// work is queued, and the program's tensors and the graph are free already.
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
  std::shared_ptr<GradientSlot> gradient;  // null: no gradient is asked for
  at::Tensor zeros;                        // in the place of a gradient that never came
};
using LayerPieces = std::vector<LayerPiece>;
using PiecesByDevice = std::map<int, LayerPieces>;  // -1: the CPU

class PendingLayers {
 public:
  // Once backward has passed all gradients. `captured` is by layer, of the first one of a name.
  // c10::Error as LayerOptions say, where a layer never ran, or the output does not depend on it.
  PendingLayers(const std::vector<std::string>& layers, std::shared_ptr<const LayerWay> way,
                std::map<size_t, PiecesByDevice> captured);

  // In the order of the layers. Blocks until all copies are done, one after the other. Once.
  std::vector<LayerResult> Wait();

 private:
  // In the order in which they are concatenated.
  std::vector<LayerPieces> InDeviceOrder(const std::string& layer, PiecesByDevice by_device) const;
  // Where there was no gradient: what Wait gives instead.
  void MakeZeros(LayerPart part);
  LayerTensor Gather(LayerPart part);
  at::Tensor Join(const std::vector<at::Tensor>& pieces) const;

  std::shared_ptr<const LayerWay> way_;
  std::vector<LayerResult> results_;  // without their tensors
  std::vector<size_t> first_of_name_;
  std::map<size_t, std::vector<LayerPieces>> devices_;  // by layer
  std::vector<std::pair<uint64_t, LayerPart>>
      arrivals_;  // in the order in which they were captured
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PENDING_LAYERS_H_
