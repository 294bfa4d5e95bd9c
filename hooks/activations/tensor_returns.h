// Returns saved tensors to backward: from the device if it still has them, else by a fetch on
// demand, a prefetch or a recast.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_
#define PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_

#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// Backward reads a fetched tensor after its copy.
inline constexpr WaitSite kUnpackAfterCopyIn("kUnpackAfterCopyIn", kHooksWaits);
// Backward on another stream than forward waits for forward's work.
inline constexpr WaitSite kUnpackOnOtherStream("kUnpackOnOtherStream", kHooksWaits);

// The bytes of a saved tensor on the device.
struct BytesOnDevice {
  c10::Storage storage;
  int64_t shift_bytes = 0;  // added to a byte's offset in the original storage
  // True for a copy that the originally saved tensor does not share.
  bool is_copy = false;
  bool cast_again = false;        // this call has recast it
  c10::DispatchKeySet keys = {};  // dispatch keys to add to the device's
};

// A reader of the bytes.
struct Reading {
  Parcel::Reader& reader;
  const BoundStream& stream;  // the stream that uses them
  int64_t backward;           // CurrentBackward()
};

class TensorReturns {
 public:
  TensorReturns(const OffloadOptions& options, DeviceTier& tier, OffloadState& state,
                OffloadStatsRecorder& stats)
      : options_(options), tier_(tier), state_(state), stats_(stats) {}

  // Returns the record's bytes, ready for use on the reader's stream. Throws c10::Error on failure;
  // `describe` names the tensor for its message.
  BytesOnDevice Acquire(StorageRecord& record, const Reading& by,
                        absl::FunctionRef<std::string()> describe);

  // Prefetches what `backward` will read after the record.
  void Prefetch(const StorageRecord& record, int64_t backward);

  // Frees unread prefetches, memory of released tensors whose copy is pending, and aliases that
  // autograd has released.
  void FreeUnneeded();

  // Frees unread fetches of a backward that has ended.
  void EndBackward(int64_t backward);

 private:
  using Arrivals = absl::InlinedVector<Arrival, 1>;

  // Finds the bytes on the device without a fetch or a recast. No storage if there are none.
  BytesOnDevice Find(StorageRecord& record, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // Recasts the parameter, or returns the latest recast if it lives.
  BytesOnDevice CastAgain(StorageRecord& record, const Reading& by,
                          absl::FunctionRef<std::string()> describe);
  // Orders `stream` after `made_on`, and records the use of the memory.
  void UseOnStream(const c10::Storage& storage, const BoundStream& made_on,
                   const BoundStream& stream);
  // Makes the reader's stream wait for the copy, unless it waits for a later one already.
  void WaitForCopyIn(const Transfer& copy, const Reading& by);
  // Throws c10::Error unless the bytes have the saved checksum. `tell` describes the tensor and its
  // transfers.
  void Verify(const StorageRecord& record, const BytesOnDevice& bytes,
              absl::FunctionRef<std::string()> tell);
  // Like AllocateStorage; with a target, the error of a device without memory names it.
  c10::Storage AllocateOrNameTarget(const BoundStream& stream, uint64_t size_bytes) const;
  void FetchNow(SavedParcel& parcel, FetchClaim claim, const Reading& by);
  // Returns false on failure, which stops prefetching for now. Device errors are left to a fetch on
  // demand to report.
  bool FetchAhead(Arrivals& wanted, int64_t backward);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  const OffloadOptions& options_;
  DeviceTier& tier_;
  OffloadState& state_;
  OffloadStatsRecorder& stats_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_
