// A case of allocator_bench: a thread allocates while another thread keeps one block in each piece
// of the locked memory, as the loader of a program may.
//
// This is the worst case of an arena per thread. No piece can move to the allocating thread's
// arena, so each allocation is a miss that takes the pool's lock, runs a barrier and searches the
// other arena. The keeping thread sleeps; a barrier would also wait for a running thread.

#ifndef PINION_BENCH_ALLOCATOR_BESIDE_HELD_H_
#define PINION_BENCH_ALLOCATOR_BESIDE_HELD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/allocator/allocation_trace.h"
#include "pinion/bench/allocator/allocator_cases.h"
#include "pinion/bench/allocator/latency.h"
#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/statistics.h"

namespace pinion {

// Arenas exchange free memory in pieces: of 2 MiB for segments as small as the bench's.
inline constexpr uint64_t kHeldPieceBytes = 2 * kMiB;
// The kept memory is 256 MiB: a power of two, like the locked memory, so that no piece is left
// over.
inline constexpr int kHeldPieces = 128;

inline const void* AddressOf(const PinnedBlock& block) { return block.data(); }
inline const void* AddressOf(const PlainBlock& block) { return block.data; }

// Returns the trace with sizes divided so that the largest fits beside the kept block of a piece.
inline AllocationTrace InPieces(AllocationTrace trace) {
  uint64_t largest_bytes = 0;
  for (const AllocationEvent& event : trace.events) {
    largest_bytes = std::max(largest_bytes, event.size_bytes);
  }
  const uint64_t divisor = largest_bytes / (kHeldPieceBytes / 2) + 1;
  for (AllocationEvent& event : trace.events) {
    if (event.size_bytes != 0) event.size_bytes = std::max(event.size_bytes / divisor, uint64_t{1});
  }
  trace.peak_bytes /= divisor;
  return trace;
}

// Keeps `held` blocks on this thread, one of 32 KiB in each piece and the rest in slabs, while
// another thread replays the trace. FailedPrecondition if an allocation was not a miss.
template <typename Peer>
absl::StatusOr<CaseResult> BesideHeld(const AllocationTrace& trace, int held, int samples) {
  constexpr uint64_t kLeastLargeBytes = 32 * kKiB;  // smaller blocks lie in slabs
  constexpr uint64_t kRedZoneBytes = 128;           // at most, in hardened builds
  constexpr uint64_t kSmallBytes = 256;
  Peer peer(std::make_shared<CopyClock>(0));
  std::vector<typename Peer::Block> filling;
  for (uint64_t i = 0; i < kHeldPieces * (kHeldPieceBytes / kLeastLargeBytes); ++i) {
    filling.push_back(peer.Allocate(kLeastLargeBytes - kRedZoneBytes));
  }
  std::set<uint64_t> pieces;
  std::vector<typename Peer::Block> kept;
  for (typename Peer::Block& block : filling) {
    const auto address = reinterpret_cast<uintptr_t>(AddressOf(block));
    if (pieces.insert(address / kHeldPieceBytes).second) {
      kept.push_back(std::move(block));
    } else {
      peer.Free(std::move(block));
    }
  }
  while (kept.size() < static_cast<size_t>(held)) kept.push_back(peer.Allocate(kSmallBytes));
  const uint64_t locked_bytes = peer.locked_bytes();

  std::vector<double> pair_ns(samples);
  CallTimes calls(2 * trace.allocations * samples);
  std::jthread([&] {
    const OnProcessor processor(1);
    Blocks<Peer> blocks(trace.blocks);
    const auto plain = [](const auto& call) { call(); };
    Replay(peer, trace, blocks, plain);
    for (double& sample : pair_ns) {
      const double start = NowNs();
      Replay(peer, trace, blocks, plain);
      sample = (NowNs() - start) / static_cast<double>(trace.allocations);
    }
    for (int i = 0; i < samples; ++i) {
      Replay(peer, trace, blocks, [&](const auto& call) { calls.Time(call); });
    }
  }).join();

  // Statistics do not separate the arenas' hits. A piece with a kept block cannot move, so the
  // other thread has none unless one was pinned for it.
  if constexpr (std::is_same_v<Peer, PinionPeer>) {
    if (pieces.size() * kHeldPieceBytes != locked_bytes || peer.locked_bytes() != locked_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("no misses alone: ", pieces.size(), " pieces hold a block, of ",
                       locked_bytes / kHeldPieceBytes, " at first and ",
                       peer.locked_bytes() / kHeldPieceBytes, " at the end"));
    }
  }
  for (typename Peer::Block& block : kept) peer.Free(std::move(block));
  return CaseResult{Summarize(pair_ns).median, calls.PercentileNs(0.99)};
}

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_BESIDE_HELD_H_
