// Statistics of an OffloadSession.
//
//   const OffloadStats stats = session->GetStats();
//   std::cout << stats.ToString() << stats.kept_small << " tensors were small\n";
//
// Thread safety: plain data.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_

#include <cstdint>
#include <string>

namespace pinion {

// Counters since the session was created. Byte counts cover each copied storage once per version.
struct OffloadStats {
  uint64_t packed = 0;      // reached a scope: offloaded + shared + cast_again + kept()
  uint64_t offloaded = 0;   //   with a host copy of their own
  uint64_t shared = 0;      //   views and repeats of a tensor that was counted
  uint64_t cast_again = 0;  //   not copied: recast from the parameter when needed
  uint64_t kept_small = 0;  //   kept on the device, by reason:
  uint64_t kept_parameter = 0;
  uint64_t kept_head = 0;  //   saved by a head of the scope's module (module_heads.h)
  uint64_t kept_held = 0;  //   a leaf that the program references: a copy would free nothing
  uint64_t kept_no_host_memory = 0;
  uint64_t kept_in_backward = 0;  //   recomputed during backward, needed at once
  uint64_t kept_scope_ended = 0;  //   saved by a thread that has outlived the scope
  uint64_t kept_capturing = 0;
  //   The device could not be set up, its engine has failed, asking whether the stream captures
  //   failed, the storage was resized before the copy, or the copy failed.
  uint64_t kept_copy_failed = 0;
  uint64_t kept_unsupported = 0;  //   not strided, not of the session's device type, ...
  //   The plan does not move it (yet): it fits, evicting it frees nothing, or its copy comes later.
  uint64_t kept_as_planned = 0;
  uint64_t offloaded_bytes = 0;    // as copied, with the padding of groups
  uint64_t groups = 0;             // host blocks that several small tensors share
  uint64_t grouped = 0;            //   tensors in them
  uint64_t evicted_bytes = 0;      // evicted from the device after their copy
  uint64_t evicted_not_freed = 0;  //   tensors whose memory had another owner when evicted

  // With a memory target in bytes: steps that were seen to exceed it during a scope or a backward.
  // A step that ended because the device refused memory beyond the target counts, too.
  uint64_t steps_over_target = 0;
  uint64_t most_bytes_over_target = 0;  // the largest excess

  uint64_t unpacked = 0;
  uint64_t reused_on_device = 0;  // the storage was still alive: no copy back
  uint64_t prefetch_hits = 0;     // here and below a group counts once
  uint64_t fetched_on_demand = 0;
  uint64_t recast = 0;              // recasts of weights, once for several readers
  uint64_t prefetches_dropped = 0;  // fetched, never read: partial backward, dead branch
  uint64_t prefetches_refused = 0;  // not started: no device memory, or a failed copy
  uint64_t prefetch_looks = 0;      // parcels examined to choose prefetches
  uint64_t fetched_bytes = 0;
  uint64_t verified = 0;  // fetched tensors with the right checksum (OffloadOptions::verify)
  uint64_t live_handles = 0;

  // Wall time of the host inside pack and unpack, total. Must stay the last field, behind
  // `uint64_t` counters: the recorder sums those of all threads as an array
  // (offload_stats_recorder.cc).
  double pack_unpack_us = 0;

  // Returns the number of tensors that stayed on the device. Each has exactly one reason.
  uint64_t kept() const;

  std::string ToString() const;  // a few lines for people
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATS_H_
