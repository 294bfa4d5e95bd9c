// The window of streamed weights within a memory target: at each use, what the target leaves beside
// everything else on the device (engine/schedule/visit_room.h).
//
//   const AllocatorBytes allocator = AllocatorBytesOf(device);   // with no lock held
//   schedule.set_window_bytes(window.AtUse(use, allocator));
//
// Thread safety: none; its owner's lock guards it.

#ifndef PINION_HOOKS_WEIGHTS_TARGET_WINDOW_H_
#define PINION_HOOKS_WEIGHTS_TARGET_WINDOW_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "pinion/engine/schedule/visit_room.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class TargetWindow {
 public:
  TargetWindow(uint64_t target_bytes, std::shared_ptr<const DeviceShare> share,
               std::shared_ptr<const Visitor> weights)
      : target_bytes_(target_bytes),
        share_(std::move(share)),
        weights_(std::move(weights)),
        room_(target_bytes) {}

  // Returns the window until the next use. `allocator` was read shortly before. A unit that another
  // thread fetches meanwhile may count twice or not at all.
  uint64_t AtUse(const VisitUse& use, const AllocatorBytes& allocator);

  // Device memory above the target.
  struct Excess {
    uint64_t device_bytes = 0;  // the peak since the first use
    uint64_t target_bytes = 0;
    uint32_t unit = 0;  // used last before the peak was seen
  };
  // Returns the first excess, once.
  std::optional<Excess> TakeFirstExcess();
  uint64_t excess_device_bytes() const { return excess_.device_bytes; }  // 0: no excess

 private:
  const uint64_t target_bytes_;
  const std::shared_ptr<const DeviceShare> share_;
  const std::shared_ptr<const Visitor> weights_;
  VisitRoom room_;
  std::optional<uint32_t> last_unit_;
  int64_t peak_bytes_ = 0;  // the allocator's at the last use
  Excess excess_;
  bool is_told_ = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_TARGET_WINDOW_H_
