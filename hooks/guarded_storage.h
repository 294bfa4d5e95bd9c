// Device memory that a copy may still touch, and the order in which it may go.
//
// Rule: every device buffer under copy has one owner. On whatever thread that owner lets go, the
// stream that the buffer was allocated on waits for the copy first, so the framework cannot hand
// the memory out again while the copy still reads or writes it. If that wait cannot be enqueued the
// host waits; if it cannot either (a poisoned engine, an exiting process) the memory is leaked.
//
// Thread safety: a value; letting go of different ones on different threads is fine. Never destroy
// one with a lock held: it calls the device.

#ifndef PINION_HOOKS_GUARDED_STORAGE_H_
#define PINION_HOOKS_GUARDED_STORAGE_H_

#include <c10/core/Storage.h>

#include <optional>

#include "pinion/engine/transfer_engine.h"
#include "pinion/engine/wait_site.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

class GuardedStorage {
 public:
  GuardedStorage() = default;  // empty
  // `stream` is the one that the storage belongs to: its frees are ordered on it.
  GuardedStorage(c10::Storage storage, const BoundStream& stream, Transfer copy, WaitSite site)
      : storage_(std::move(storage)), stream_(stream), copy_(std::move(copy)), site_(site) {}
  GuardedStorage(GuardedStorage&& other) noexcept;
  GuardedStorage& operator=(GuardedStorage&& other) noexcept;
  ~GuardedStorage();

  explicit operator bool() const { return static_cast<bool>(storage_); }
  // Valid unless empty. Using the bytes on `stream` before the copy is done is the user's to order.
  const c10::Storage& storage() const { return storage_; }
  const Transfer& copy() const { return copy_; }
  const BoundStream& stream() const { return *stream_; }

  // Lets go without the wait: a stream that uses the storage has waited for the copy, and the
  // framework orders the free after that stream.
  void Disarm() { storage_ = c10::Storage(); }

 private:
  void Drop();

  c10::Storage storage_;
  std::optional<BoundStream> stream_;
  Transfer copy_;
  WaitSite site_ = WaitSite::kFreeAfterCopy;
};

}  // namespace pinion

#endif  // PINION_HOOKS_GUARDED_STORAGE_H_
