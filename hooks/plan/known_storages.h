// Tracks a step's device storages, of its objects and of fetched copies, and computes how many of
// the allocator's bytes are not theirs.
//
//   const KnownStorages::Bytes begin = storages.CountAt(allocated_bytes);
//   ... a packer packs a tensor ...
//   const KnownStorages::Bytes end = storages.CountAt(allocated_bytes);
//   storages.NoteAllocations(begin, end);
//   storages.Hold(storages.FindOrAdd(tensor.storage()));
//   entry.other_bytes = storages.OtherBytes(end);
//
// Destroyed storages stay known by a weak reference, which keeps their address from being reused.
// CountAt visits all living storages. CountAfter visits the freed ones that it is given, and those
// with memory that is not the allocator's own or was replaced. It misses memory that one storage
// passes to another without a free (copy on write) until the next CountAt.
//
// Thread safety: not thread-safe. Frees no memory and does not call the device.

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
  using Id = size_t;  // ascending
  using Objects = absl::InlinedVector<uint32_t, 2>;

  // Device bytes at one moment.
  struct Bytes {
    int64_t allocated = 0;
    int64_t known = 0;  // of all known living storages
  };

  Bytes CountAt(int64_t allocated_bytes);
  // Like CountAt. `freed` must be all memory that the allocator got back since the last such call.
  Bytes CountAfter(int64_t allocated_bytes, absl::Span<const void* const> freed);
  // Excludes bytes that a packer allocated and did not free between the moments from the other
  // bytes: they are prefetches into storages that are not known yet.
  void NoteAllocations(const Bytes& begin, const Bytes& end);
  // Returns the bytes that are neither held nor fetched. `end` must be from the latest count.
  int64_t OtherBytes(const Bytes& end) const;

  // Makes the storage known.
  Id FindOrAdd(const c10::Storage& storage);
  // Reports that `storage` was read. An unknown storage was fetched for one object, which owns all
  // of it. If the reader keeps it, as a backward that builds a graph does, it counts as other
  // bytes, since the object's eviction does not free it. Returns whether it was fetched.
  bool NoteRead(const c10::Storage& storage, bool reader_keeps);

  // Counts the storage as an object's, until Release was called as often as Hold.
  void Hold(Id id);
  void Release(Id id);

  size_t size() const { return storages_.size(); }
  bool IsGone(Id id) const { return storages_[id].reference.expired(); }
  size_t Owners(Id id) const { return storages_[id].reference.use_count(); }
  // For the caller: the objects in the storage.
  Objects& objects(Id id) { return storages_[id].objects; }

 private:
  struct Storage {
    explicit Storage(const c10::Storage& storage)
        : reference(storage.getWeakStorageImpl()), size_bytes(AllocationBytes(storage.nbytes())) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> reference;
    uint64_t size_bytes;
    Objects objects = {};
    int holds = 0;
    bool is_living = true;  // at the last count
  };

  // Returns whether the storage is destroyed, and then subtracts its bytes.
  bool CountOutIfGone(Id id);
  // Indexes the memory of a storage that becomes known.
  void NoteData(const c10::Storage& storage, Id id);

  std::vector<Storage> storages_;  // by Id
  absl::flat_hash_map<const c10::StorageImpl*, Id> ids_;
  std::vector<Id> living_;  // also those destroyed since the last CountAt
  absl::flat_hash_map<const void*, Id> by_data_;
  std::vector<Id> untold_;     // storages that CountAfter must visit; some may be destroyed
  uint64_t living_bytes_ = 0;  // of all storages known to live
  uint64_t held_bytes_ = 0;    // of these, the held ones
  int64_t ahead_bytes_ = 0;    // prefetched, not read
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_KNOWN_STORAGES_H_
