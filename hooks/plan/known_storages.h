// The device storages that the record of a step knows: those that its objects lie in, and those
// that were fetched for them. It tells how many of the bytes that LibTorch's allocator has given
// out are none of theirs.
//
//   const KnownStorages::Bytes begin = storages.CountAt(allocated_bytes);
//   ... a tensor is packed, by whoever packs it ...
//   const KnownStorages::Bytes end = storages.CountAt(allocated_bytes);
//   storages.NoteAllocations(begin, end);
//   storages.Hold(storages.FindOrAdd(tensor.storage()));
//   entry.other_bytes = storages.OtherBytes(end);
//
// A storage that is gone stays known, by a weak reference: no other one gets its address. CountAt
// walks those that live. CountAfter is told instead what was freed, and walks none but those of
// which it would not be told: whose memory is not the allocator's own, or was exchanged for other
// memory. (Memory that one storage hands to another without freeing it, as copies on write do, is
// not told of either: who had it counts as living until the next CountAt.)
//
// Thread safety: none. Nothing here frees memory or calls the device.

#ifndef PINION_HOOKS_PLAN_KNOWN_STORAGES_H_
#define PINION_HOOKS_PLAN_KNOWN_STORAGES_H_

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/device/allocation_bytes.h"

namespace pinion {

class KnownStorages {
 public:
  using Id = size_t;  // in the order in which they became known
  using Objects = absl::InlinedVector<uint32_t, 2>;

  // On the device at one moment.
  struct Bytes {
    int64_t allocated = 0;
    int64_t known = 0;  // of all storages that are known and live
  };

  Bytes CountAt(int64_t allocated_bytes);
  // The same. `freed`: all that the device's allocator has got back since the last such call.
  Bytes CountAfter(int64_t allocated_bytes, absl::Span<const void* const> freed);
  // What was allocated in between, less what was let go of, is none of the other bytes: it was
  // fetched ahead, into storages that are not known yet.
  void NoteAllocations(const Bytes& begin, const Bytes& end);
  // At `end`, which the last of these calls has returned, beside what is held or was fetched.
  int64_t OtherBytes(const Bytes& end) const;

  // Known from now on.
  Id FindOrAdd(const c10::Storage& storage);
  // `storage` was read. If it is not known, it was fetched for an object, just now or ahead, and
  // all of it is that one's. Where the reader keeps it, as a backward that makes a graph does, it
  // is among the other bytes: the object's drop does not free it. Whether it was fetched.
  bool NoteRead(const c10::Storage& storage, bool reader_keeps);

  // It is an object's, until it is released as often as it was held.
  void Hold(Id id);
  void Release(Id id);

  size_t size() const { return storages_.size(); }
  bool IsGone(Id id) const { return storages_[id].reference.expired(); }
  size_t Owners(Id id) const { return storages_[id].reference.use_count(); }
  // The caller's: which objects lie in it.
  Objects& objects(Id id) { return storages_[id].objects; }
  const Objects& objects(Id id) const { return storages_[id].objects; }

 private:
  struct Storage {
    explicit Storage(const c10::Storage& storage)
        : reference(storage.getWeakStorageImpl()), size_bytes(AllocationBytes(storage.nbytes())) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> reference;
    uint64_t size_bytes;
    Objects objects = {};
    int holds = 0;
    bool is_living = true;  // when it was last looked at
  };

  // Whether it has gone. Then its bytes count no more.
  bool CountOutIfGone(Id id);
  // Where the memory of one that is known from now on lies.
  void NoteData(const c10::Storage& storage, Id id);

  std::vector<Storage> storages_;  // by Id
  absl::flat_hash_map<const c10::StorageImpl*, Id> ids_;
  std::vector<Id> living_;  // and those that went since the last CountAt
  absl::flat_hash_map<const void*, Id> by_data_;
  std::vector<Id> untold_;     // that CountAfter has to look at, and some that have gone
  uint64_t living_bytes_ = 0;  // of all that live, as far as was seen
  uint64_t held_bytes_ = 0;    // of these, what is held
  int64_t ahead_bytes_ = 0;    // fetched, and not read yet
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_KNOWN_STORAGES_H_
