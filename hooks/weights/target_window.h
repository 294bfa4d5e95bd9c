// The window of weights that visit a device within a memory target: what the target leaves beside
// all others, use by use (engine/plan/visit_room.h).
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

#include "pinion/engine/plan/visit_room.h"
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

  // What all units may have until the next use, now that an operator is about to use one.
  // `allocator` says what the device had shortly before. Where several threads use units, one that
  // another fetches in between may count twice or not at all.
  uint64_t AtUse(const VisitUse& use, const AllocatorBytes& allocator);

  // The device had more than the target.
  struct Excess {
    uint64_t device_bytes = 0;  // the most that it had, since the first use
    uint64_t target_bytes = 0;
    uint32_t unit = 0;  // which was used last before that was seen
  };
  // The first time that this is so.
  std::optional<Excess> TakeFirstExcess();
  uint64_t excess_device_bytes() const { return excess_.device_bytes; }  // 0: it had no more

 private:
  const uint64_t target_bytes_;
  const std::shared_ptr<const DeviceShare> share_;
  const std::shared_ptr<const Visitor> weights_;
  VisitRoom room_;
  std::optional<uint32_t> last_unit_;
  int64_t peak_bytes_ = 0;  // as the allocator had it at the last use
  Excess excess_;
  bool is_told_ = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_TARGET_WINDOW_H_
