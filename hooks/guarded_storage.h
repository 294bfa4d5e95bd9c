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
#include <utility>

#include "absl/container/inlined_vector.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

class GuardedStorage {
 public:
  GuardedStorage() = default;  // empty
  // `stream` is the one that the storage belongs to: its frees are ordered on it.
  GuardedStorage(const BoundStream& stream, Transfer copy, WaitSite site)
      : stream_(stream), copy_(std::move(copy)), site_(site) {}
  GuardedStorage(c10::Storage storage, const BoundStream& stream, Transfer copy, WaitSite site)
      : GuardedStorage(stream, std::move(copy), site) {
    Add(std::move(storage));
  }
  GuardedStorage(GuardedStorage&& other) noexcept;
  GuardedStorage& operator=(GuardedStorage&& other) noexcept;
  ~GuardedStorage();

  // Another one under the same copy, which one wait covers. Not empty.
  void Add(c10::Storage storage) { storages_.push_back(std::move(storage)); }
  // Those under another copy of the same direction, of the same engine, with the same stream and
  // site: one wait for the later copy covers both.
  void Add(GuardedStorage other);

  explicit operator bool() const { return !storages_.empty(); }
  // Valid unless empty; the first one. Using the bytes on `stream` before the copy is done is the
  // user's to order.
  const c10::Storage& storage() const { return storages_.front(); }
  const Transfer& copy() const { return copy_; }
  const BoundStream& stream() const { return *stream_; }

  // Lets go without the wait: a stream that uses the storage has waited for the copy, and the
  // framework orders the free after that stream.
  void Disarm() { storages_.clear(); }

 private:
  void Drop();

  absl::InlinedVector<c10::Storage, 1> storages_;
  std::optional<BoundStream> stream_;
  Transfer copy_;
  WaitSite site_ = WaitSite::kFreeAfterCopy;
};

}  // namespace pinion

#endif  // PINION_HOOKS_GUARDED_STORAGE_H_
