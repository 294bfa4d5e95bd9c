// What travels together: one block of host memory, one copy out, one copy back.
//
// A large tensor is a parcel of its own; small ones share one (engine/plan/pack_plan.h). All that
// is about copies is said of parcels, all that is about tensors of records: there is one path for
// both kinds.
//
//   out    the records' sources are copied, each to its place in the block; or they are gathered on
//          the device first, and from then on `gathered` stands in for the sources
//   back   one copy fills `fetched`, of which each tensor is a view
//
// Fields below the line are guarded by the owning DeviceOffloader's mutex, as a record's are.

#ifndef PINION_HOOKS_PARCEL_H_
#define PINION_HOOKS_PARCEL_H_

#include <c10/core/Storage.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/engine/host_buffer.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/guarded_storage.h"
#include "pinion/hooks/saved_tensor_hooks.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

struct StorageRecord;

struct Parcel : public std::enable_shared_from_this<Parcel> {
  Parcel(const BoundStream& stream, std::shared_ptr<HostBuffer> buffer)
      : pack_stream(stream), host(std::move(buffer)) {}

  uint64_t size_bytes() const { return host->size_bytes(); }

  const BoundStream pack_stream;  // the copy out, and a gather before it, come after its work
  const std::shared_ptr<HostBuffer> host;

  // ---- guarded ----
  Transfer copy_out;
  std::vector<StorageRecord*> records;  // with live handles
  c10::Storage gathered;                // empty if the sources were copied one by one; once evicted

  GuardedStorage fetched;      // the parcel's bytes, back on the device
  bool fetching = false;       // some thread fills `fetched`
  bool fetched_ahead = false;  // and nobody has read it yet
  int64_t fetched_in = -1;     // by which backward, last

  // Handles that were unpacked since `epoch` began. When all live ones are, `fetched` may go.
  int live_handles = 0;
  int read_handles = 0;
  uint64_t epoch = 1;

  // In the eviction window; while in it, the device memory that goes with the parcel's eviction,
  // and what that counts there.
  std::optional<std::list<Parcel*>::iterator> window_position;
  uint64_t held_bytes = 0;
  uint64_t window_bytes = 0;
  uint64_t ahead_bytes = 0;  // while `fetched_ahead`, what it counts in the prefetch window
  uint64_t sequence = 0;     // of the record that was saved last
  ScopeId scope = 0;         // of that one

  std::pair<ScopeId, uint64_t> OrderKey() const { return {scope, sequence}; }
};

}  // namespace pinion

#endif  // PINION_HOOKS_PARCEL_H_
