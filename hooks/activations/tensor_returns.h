// How saved tensors come back: from the device if it still has them, else from the host tier, on
// demand or ahead of it.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_
#define PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_

#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// Backward reads a fetched tensor after its copy in is done.
inline constexpr WaitSite kUnpackAfterCopyIn("kUnpackAfterCopyIn", kHooksWaits);
// Backward on another stream than forward waits for forward's work.
inline constexpr WaitSite kUnpackOnOtherStream("kUnpackOnOtherStream", kHooksWaits);

// Where backward finds the bytes of a saved tensor.
struct BytesOnDevice {
  c10::Storage storage;
  int64_t shift_bytes = 0;  // from a place in the original storage to the same byte here
  // A copy: nobody reaches it through the tensor that was saved.
  bool is_copy = false;
  bool cast_again = false;        // by the call that returns it
  c10::DispatchKeySet keys = {};  // of the tensor, beside its device's
};

// Who wants the bytes.
struct Reading {
  Parcel::Reader& reader;
  const BoundStream& stream;  // on which they are used
  int64_t backward;           // CurrentBackward()
};

class TensorReturns {
 public:
  TensorReturns(const OffloadOptions& options, DeviceTier& tier, OffloadState& state,
                OffloadStatsRecorder& stats)
      : options_(options), tier_(tier), state_(state), stats_(stats) {}

  // The record's bytes, ready for use on the reader's stream. Throws c10::Error if they cannot be
  // had; `describe` tells its message which tensor it is.
  BytesOnDevice Acquire(StorageRecord& record, const Reading& by,
                        absl::FunctionRef<std::string()> describe);

  // Fetches what `backward` will read after the record.
  void Prefetch(const StorageRecord& record, int64_t backward);

  // Lets go of what was fetched and not read, of what nobody needs any more but for its copy out,
  // and of what came back from those that it was lent to.
  void FreeUnneeded();

  // Of what was fetched in the backward, which has ended.
  void EndBackward(int64_t backward);

 private:
  using Arrivals = absl::InlinedVector<Arrival, 1>;

  // Without a copy back; no storage if there is none.
  BytesOnDevice Find(StorageRecord& record, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu, kRecordsLock);
  // The record's bytes by a cast of its parameter, or the last one's if they live.
  BytesOnDevice CastAgain(StorageRecord& record, const Reading& by,
                          absl::FunctionRef<std::string()> describe);
  // Memory that `made_on` has the last work on is about to be used on `stream`.
  void UseOnStream(const c10::Storage& storage, const BoundStream& made_on,
                   const BoundStream& stream);
  // The reader's stream waits for the copy, unless it waits for a later one already.
  void WaitForCopyIn(const Transfer& copy, const Reading& by);
  // Throws unless the bytes are those that were saved. `tell` says of the tensor which it is, and
  // how its bytes went and came.
  void Verify(const StorageRecord& record, const BytesOnDevice& bytes,
              absl::FunctionRef<std::string()> tell);
  void FetchNow(SavedParcel& parcel, FetchClaim claim, const Reading& by);
  // False when that failed: backward goes on without more prefetches for now. Whatever is wrong
  // with the device is for a fetch that is needed to report.
  bool FetchAhead(Arrivals& wanted, int64_t backward);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  const OffloadOptions& options_;
  DeviceTier& tier_;
  OffloadState& state_;
  OffloadStatsRecorder& stats_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_TENSOR_RETURNS_H_
