// The cases of allocator_bench, for any peer (peers.h).

#ifndef PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_
#define PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
#include "pinion/bench/allocator/allocator_timing.h"
#include "pinion/bench/allocator/peers.h"

namespace pinion {

// Memory that a trace's blocks take beyond their sizes.
struct WasteResult {
  double mean_percent = 0;     // booked over requested bytes, over all allocations
  double locked_per_peak = 0;  // locked over peak live bytes; 0: unknown
};

template <typename Peer>
using Blocks = std::vector<std::optional<typename Peer::Block>>;

// Makes one event's call through `around`.
template <typename Peer, typename Around>
void Play(Peer& peer, const AllocationEvent& event, std::optional<typename Peer::Block>& block,
          Around&& around) {
  if (event.kind == AllocationEvent::Kind::kAllocate) {
    around([&] { block.emplace(peer.Allocate(event.size_bytes)); });
  } else {
    around([&] {
      peer.Free(*std::move(block));
      block.reset();
    });
  }
}

// Replays the trace once.
template <typename Peer, typename Around>
void Replay(Peer& peer, const AllocationTrace& trace, Blocks<Peer>& blocks, Around&& around) {
  for (const AllocationEvent& event : trace.events) {
    Play(peer, event, blocks[event.block], around);
  }
}

// Returns the approximate time of one replay.
template <typename Peer>
double ReplayNs(const AllocationTrace& trace) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks(trace.blocks);
  return SamplesNs(2, 1, [&] { Replay(peer, trace, blocks, kUntimed); }).back();
}

// Measures `threads` threads that replay the trace at once on one allocator.
template <typename Peer>
CaseResult MixedTrace(const AllocationTrace& trace, int threads, int samples) {
  Peer peer(std::make_shared<CopyClock>(0));
  // With a processor for each thread a sample takes 0.2 ms; otherwise some milliseconds, since each
  // switch of threads finds cold caches.
  const double least_ns = threads <= OnProcessor::Count() ? 2e5 : 3e6;
  const int replays = static_cast<int>(std::max(1.0, least_ns / ReplayNs<Peer>(trace)));
  std::vector<double> pair_ns(samples);
  CallTimes calls(2 * trace.allocations * replays * threads);
  std::vector<CallTimes> thread_calls(threads, CallTimes(2 * trace.allocations * replays));
  std::barrier barrier(threads);
  // A sample lasts from the first thread's start to the last one's end: with few processors a
  // thread may finish before another has left the barrier.
  std::vector<double> begin_ns(threads);
  std::vector<double> end_ns(threads);
  const auto play = [&](int thread) {
    const OnProcessor processor(thread);
    Blocks<Peer> blocks(trace.blocks);
    Replay(peer, trace, blocks, kUntimed);
    for (double& sample : pair_ns) {
      barrier.arrive_and_wait();
      begin_ns[thread] = NowNs();
      for (int i = 0; i < replays; ++i) Replay(peer, trace, blocks, kUntimed);
      end_ns[thread] = NowNs();
      barrier.arrive_and_wait();
      if (thread == 0) {
        sample = (*std::max_element(end_ns.begin(), end_ns.end()) -
                  *std::min_element(begin_ns.begin(), begin_ns.end())) /
                 static_cast<double>(replays * trace.allocations);
      }
    }
    barrier.arrive_and_wait();
    for (int i = 0; i < replays; ++i) Replay(peer, trace, blocks, thread_calls[thread]);
  };
  std::vector<std::jthread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(play, thread);
  play(0);
  others.clear();
  for (const CallTimes& times : thread_calls) calls.Merge(times);
  return {std::move(pair_ns), calls};
}

// Measures allocation on one thread and free on another, with a ticket of a copy that still reads,
// as in backward. Copies take 32 submissions. Batches of 64 blocks keep the queue's cost out of the
// result. One processor needs a longer queue: each switch of threads costs as much as dozens of
// pairs.
template <typename Peer>
CaseResult ProducerConsumer(const AllocationTrace& trace, int samples) {
  constexpr uint64_t kBatches = 320;
  constexpr size_t kBatch = 64;
  constexpr uint64_t kBlocks = kBatches * kBatch;
  const size_t queue_batches = OnProcessor::Count() > 1 ? 4 : 32;
  const auto clock = std::make_shared<CopyClock>(/*lag=*/32);
  Peer peer(clock);
  std::vector<uint64_t> sizes;
  for (const AllocationEvent& event : trace.events) {
    if (event.kind == AllocationEvent::Kind::kAllocate) sizes.push_back(event.size_bytes);
  }

  // Batch `i` uses slot i % queue_batches: full once the producer is past it, empty once the
  // consumer is.
  std::vector<std::vector<typename Peer::Block>> queue(queue_batches);
  for (auto& slot : queue) slot.reserve(kBatch);
  alignas(64) std::atomic<uint64_t> produced{0};
  alignas(64) std::atomic<uint64_t> consumed{0};
  const auto run = [&](auto&& around_allocate, auto&& around_free) {
    produced = 0;
    consumed = 0;
    const OnProcessor processor(0);
    std::jthread consumer([&] {
      const OnProcessor other(1);
      for (uint64_t i = 0; i < kBatches; ++i) {
        SpinUntil([&] { return produced.load(std::memory_order_acquire) > i; });
        for (typename Peer::Block& block : queue[i % queue_batches]) {
          around_free([&] { peer.FreeAfter(std::move(block), clock->Submit()); });
        }
        queue[i % queue_batches].clear();
        consumed.store(i + 1, std::memory_order_release);
      }
    });
    size_t next_size = 0;
    for (uint64_t i = 0; i < kBatches; ++i) {
      SpinUntil([&] { return i - consumed.load(std::memory_order_acquire) < queue_batches; });
      for (size_t n = 0; n < kBatch; ++n) {
        const uint64_t size_bytes = sizes[next_size];
        if (++next_size == sizes.size()) next_size = 0;
        around_allocate([&] { queue[i % queue_batches].push_back(peer.Allocate(size_bytes)); });
      }
      produced.store(i + 1, std::memory_order_release);
    }
  };

  run(kUntimed, kUntimed);
  std::vector<double> pair_ns = SamplesNs(samples, kBlocks, [&] { run(kUntimed, kUntimed); });
  CallTimes allocations(kBlocks);
  CallTimes frees(kBlocks);
  run(allocations, frees);
  clock->FinishAll();
  allocations.Merge(frees);
  return {std::move(pair_ns), allocations};
}

// Allocates and frees 1 KiB beside `holes` free holes of that size that cannot coalesce (rmm#2507).
template <typename Peer>
CaseResult AmongHoles(uint64_t holes, int samples) {
  constexpr uint64_t kSize = 1024;
  constexpr int kPairs = 2000;
  Peer peer(std::make_shared<CopyClock>(0));
  std::vector<std::optional<typename Peer::Block>> blocks;
  for (uint64_t i = 0; i < 2 * holes; ++i) blocks.emplace_back(peer.Allocate(kSize));
  for (uint64_t i = 0; i < 2 * holes; i += 2) {
    peer.Free(*std::move(blocks[i]));
    blocks[i].reset();
  }
  std::vector<double> pair_ns = SamplesNs(samples, kPairs, [&] {
    for (int i = 0; i < kPairs; ++i) peer.Free(peer.Allocate(kSize));
  });
  CallTimes calls(2 * kPairs);
  for (int i = 0; i < kPairs; ++i) {
    auto block = calls([&] { return peer.Allocate(kSize); });
    calls([&] { peer.Free(std::move(block)); });
  }
  for (auto& block : blocks) {
    if (block.has_value()) peer.Free(*std::move(block));
  }
  return {std::move(pair_ns), calls};
}

// Measures the call that LibTorch makes for each non-blocking copy of pageable memory, while `held`
// pinned blocks are live.
template <typename Peer>
CaseResult RecordEventOfPageable(int held, int samples) {
  constexpr int kCalls = 2000;
  Peer peer(std::make_shared<CopyClock>(0));
  std::vector<typename Peer::Block> blocks;
  for (int i = 0; i < held; ++i) blocks.push_back(peer.Allocate(4096));
  std::vector<char> pageable(4096);
  std::vector<double> call_ns = SamplesNs(samples, kCalls, [&] {
    for (int i = 0; i < kCalls; ++i) peer.RecordEvent(pageable.data());
  });
  CallTimes calls(kCalls);
  for (int i = 0; i < kCalls; ++i) calls([&] { peer.RecordEvent(pageable.data()); });
  return {std::move(call_ns), calls};
}

template <typename Peer>
WasteResult Waste(const AllocationTrace& trace) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks(trace.blocks);
  uint64_t requested = 0;
  uint64_t booked = 0;
  for (const AllocationEvent& event : trace.events) {
    Play(peer, event, blocks[event.block], kUntimed);
    if (event.kind != AllocationEvent::Kind::kAllocate) continue;
    requested += event.size_bytes;
    booked += peer.booked_bytes(*blocks[event.block]);
  }
  return {100.0 * (static_cast<double>(booked) / static_cast<double>(requested) - 1),
          static_cast<double>(peer.locked_bytes()) / static_cast<double>(trace.peak_bytes)};
}

// Returns the largest rounding, in percent, of requests of 4 KiB to 64 MiB.
template <typename Peer>
double WorstRoundingPercent() {
  Peer peer(std::make_shared<CopyClock>(0));
  double worst = 0;
  // Rounding is worst just above a size class. The finest peer has 64 classes per doubling.
  for (uint64_t doubling = 4096; doubling < uint64_t{64} << 20; doubling *= 2) {
    for (uint64_t edge = doubling; edge < 2 * doubling; edge += doubling / 64) {
      const uint64_t request = edge + 1;
      typename Peer::Block block = peer.Allocate(request);
      worst = std::max(worst, 100.0 * (static_cast<double>(peer.booked_bytes(block)) /
                                           static_cast<double>(request) -
                                       1));
      peer.Free(std::move(block));
    }
  }
  return worst;
}

// Measures replays of which each runs on the next thread and reuses memory that the previous thread
// freed.
template <typename Peer>
CaseResult RotatingThreads(const AllocationTrace& trace, int threads, int samples) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks(trace.blocks);
  const int rounds = samples * threads;
  std::vector<double> pair_ns;
  CallTimes calls(2 * trace.allocations * rounds);
  TakeTurns(threads, 3 * rounds, [&](int turn) {
    const auto replay = [&] { Replay(peer, trace, blocks, kUntimed); };
    if (turn < rounds) return replay();
    if (turn >= 2 * rounds) return Replay(peer, trace, blocks, calls);
    pair_ns.push_back(SamplesNs(1, trace.allocations, replay).front());
  });
  return {std::move(pair_ns), calls};
}

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
    event.size_bytes = std::max(event.size_bytes / divisor, uint64_t{1});
  }
  trace.peak_bytes /= divisor;
  return trace;
}

// Keeps `held` blocks on this thread, one of 32 KiB in each piece and the rest in slabs, while
// another thread replays the trace. FailedPrecondition if an allocation was not a miss.
//
// This is the worst case of an arena per thread. No piece can move to the allocating thread's
// arena, so each allocation is a miss that takes the pool's lock, runs a barrier and searches the
// other arena. The keeping thread sleeps; a barrier would also wait for a running thread.
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

  std::vector<double> pair_ns;
  CallTimes calls(2 * trace.allocations * samples);
  std::jthread([&] {
    const OnProcessor processor(1);
    Blocks<Peer> blocks(trace.blocks);
    const auto replay = [&] { Replay(peer, trace, blocks, kUntimed); };
    replay();
    pair_ns = SamplesNs(samples, trace.allocations, replay);
    for (int i = 0; i < samples; ++i) Replay(peer, trace, blocks, calls);
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
  return CaseResult{std::move(pair_ns), calls};
}

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_
