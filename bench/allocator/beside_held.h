// What allocator_bench measures of a thread that allocates beside memory that another thread keeps,
// for any of the peers (peers.h): as a program does whose loader has all that is locked, with a
// block that lives on in each piece of it.
//
// Of Pinion this is the dearest thing about an arena per thread: nothing can move to the arena of
// the thread that allocates, so that each of its allocations is a miss, which takes the pool's
// lock, runs a barrier and looks at the other arena. The thread that keeps the memory sleeps: where
// it runs on another processor, a barrier has to wait for that, too.

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

// Arenas take free memory from one another in whole pieces, of 2 MiB where segments are as small as
// the bench's.
inline constexpr uint64_t kHeldPieceBytes = 2 * kMiB;
// Of the memory that is kept: 256 MiB. It is a power of two as what is locked is, so that no piece
// is left over.
inline constexpr int kHeldPieces = 128;

inline const void* AddressOf(const PinnedBlock& block) { return block.data(); }
inline const void* AddressOf(const PlainBlock& block) { return block.data; }

// The same with all sizes divided so that the largest is half of a piece, and fits in what a block
// leaves of one.
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

// This thread keeps `held` blocks: one of 32 KiB in each piece, and small ones, which lie in slabs.
// Another thread replays the trace meanwhile. FailedPrecondition if it did so by anything but
// misses.
template <typename Peer>
absl::StatusOr<CaseResult> BesideHeld(const AllocationTrace& trace, int held, int samples) {
  constexpr uint64_t kLeastLargeBytes = 32 * kKiB;  // less would lie in slabs, many in a piece
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

  // Statistics do not tell a hit in another arena from one in the thread's own. But a piece that is
  // not free stays where it is: with a kept block in each of them the other thread has none, unless
  // one was pinned for it.
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
