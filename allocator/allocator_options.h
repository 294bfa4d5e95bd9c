// Options of a PinnedAllocator. Plain data; the defaults fit most programs.

#ifndef PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
#define PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/config/build_config.h"

namespace pinion {

// How full the host is. A level is entered above its watermark (warn_percent, high_percent) and
// left `high_percent - low_percent` points below it, so that it does not flicker.
enum class RamLevel { kNormal, kWarn, kHigh };

struct RamLevelChange {
  RamLevel from = RamLevel::kNormal;
  RamLevel to = RamLevel::kNormal;
  double percent = 0;           // as psutil reports it
  uint64_t headroom_bytes = 0;  // see RamProbe
};

struct AllocatorOptions {
  // --- The budget for the host's RAM ---

  // The percentage of the host's RAM in use (psutil's) above which a rate-limited warning is logged
  // and counted. TRL warns at the same percentage. 0 < warn <= high.
  double warn_percent = 60.0;

  // No growth goes above this percentage of the host or of any cgroup's limit: requests are then
  // served from cached blocks only. If other programs exceed it, nothing grows until the host is
  // back at low_percent.
  double high_percent = 90.0;

  // Above high_percent, cached memory is freed until the host is at this percentage. (Below it, a
  // growth that does not fit frees as much cached memory as it needs, or nothing.)
  double low_percent = 85.0;

  // Called when a growth or Trim samples another level than the last one. It runs on the thread
  // that called Allocate, Reserve or Trim, without a lock. Several threads may call it at once. It
  // may call this and other allocators, which may call it again. It must not wait for another
  // thread that calls this allocator, because that thread may wait for the growth. An exception
  // passes through the call, which then has done nothing.
  std::function<void(const RamLevelChange&)> on_ram_level;

  // The most bytes that this allocator locks. At least the source's granularity (2 MiB for pinned
  // memory), or at least 1 with pageable_fallback. The default is no limit.
  uint64_t max_locked_bytes = UINT64_MAX;

  // The directory of the ledger in which processes count each other's pending growth. It must be on
  // a local file system (a tmpfs, for example). Empty: the ledger of this user's processes that
  // share /dev/shm. Containers that do not share /dev/shm need one directory that is mounted into
  // each of them. See HostLedger::InDirectory.
  std::string ledger_directory;

  // --- Performance ---

  // The pool starts with a 64 MiB segment. Growths raise the locked bytes to powers of two, at
  // least 16 MiB at a time, until they reach `segment_bytes`. From then on it grows by
  // `segment_bytes`, or by the block's size if that is larger. Reserve pins the missing bytes at
  // once, by at most 1 GiB or `segment_bytes` a call. A multiple of the source's granularity.
  uint64_t segment_bytes = config::kChunkBytes;  // --//config:chunk_mib, 1 GiB

  // How long Allocate waits for deferred blocks before it grows.
  absl::Duration max_wait_for_deferred = absl::Milliseconds(0);

  // Alignment of blocks of 32 KiB or more, whose sizes are rounded up to multiples of it too. A
  // power of two from 4096 up to the source's granularity: 2 MiB for whole huge pages.
  uint64_t alignment_bytes = 4096;

  // Serves pageable memory if the source or max_locked_bytes refuses to pin. Devices copy such
  // memory more slowly and block the host. high_percent holds for it too. PinnedBlock::pinned()
  // tells which kind a block is.
  bool pageable_fallback = false;

  // Returns InvalidArgument with the field, its value and its bounds.
  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
