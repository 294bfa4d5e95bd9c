// How a PinnedAllocator behaves. Plain data; the defaults fit most programs.

#ifndef PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
#define PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/config/build_config.h"

namespace pinion {

// How full the host is, by the marks of AllocatorOptions. A level is entered above its mark and
// left `high_percent - low_percent` points below it, so that it does not flicker.
enum class RamLevel { kNormal, kWarn, kHigh };

struct RamLevelChange {
  RamLevel from = RamLevel::kNormal;
  RamLevel to = RamLevel::kNormal;
  double percent = 0;           // psutil's, as sampled
  uint64_t headroom_bytes = 0;  // what the host and every cgroup leave, see RamProbe
};

struct AllocatorOptions {
  // --- The budget for the host's RAM ---

  // psutil's percentage, (total - available) / total, above which a rate-limited warning is
  // logged and counted. TRL warns at the same mark. 0 < warn <= high.
  double warn_percent = 60.0;

  // No growth goes above this percentage of the host, nor of the limit of any cgroup: requests are
  // served from cached blocks only. Where others take the host above it, nothing grows until it has
  // come down to low_percent.
  double high_percent = 90.0;

  // A host above the high mark gets cached memory back down to this percentage. (Elsewhere a growth
  // that does not fit gives back what lets it fit, or nothing.)
  double low_percent = 85.0;

  // Called when the level that a growth or Trim sampled differs from the last one: on the thread
  // that called Allocate, Reserve or Trim, before that returns, with no lock held. It may call this
  // and other allocators; a change that this brings about is told by a nested call. It must not
  // wait for another thread that calls this one: that may wait for the growth. Threads that trim or
  // grow at once may call it at once. What it throws passes through the call, which has then done
  // nothing.
  std::function<void(const RamLevelChange&)> on_ram_level;

  // The most that this allocator locks, whatever the host has. From 1 on; at least the source's
  // granularity (2 MiB for pinned memory) unless pageable_fallback is set. The default is no limit
  // of its own.
  uint64_t max_locked_bytes = UINT64_MAX;

  // What processes are about to pin at the same moment is counted in a ledger that they share:
  // those of this user, in this pid namespace. Containers that have such a namespace each share one
  // by a directory of a local file system (a tmpfs, say) that is mounted into each of them: this is
  // its path. Empty: none. (HostLedger::InDirectory)
  std::string ledger_directory;

  // --- Performance ---

  // Segments are asked for in chunks of this size, or of the block's size where that is larger;
  // until as much is locked, each growth raises what is to the next power of two that is 16 MiB or
  // more away. An empty pool begins with 64 MiB. Reserve asks for what is missing at once,
  // at most 1 GiB or a chunk a call. A multiple of the source's granularity.
  uint64_t segment_bytes = config::kChunkBytes;  // --//config:chunk_mib, 1 GiB

  // How long Allocate waits for released blocks whose tickets are not done yet before it grows.
  absl::Duration max_wait_for_deferred = absl::Milliseconds(0);

  // Where blocks of 32 KiB and more begin; their sizes are rounded up to multiples of it too. A
  // power of two from 4096 up to the source's granularity: 2 MiB for whole huge pages.
  uint64_t alignment_bytes = 4096;

  // Where the source or max_locked_bytes refuses to pin, serve from memory that is not pinned. A
  // device copies from and to it more slowly, and blocks the host meanwhile. The high mark holds
  // for it as well. PinnedBlock::pinned() tells which it is.
  bool pageable_fallback = false;

  // InvalidArgument that names the field, its value and what it must be.
  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
