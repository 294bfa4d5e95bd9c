// The cases of allocator_bench, for any peer (peers.h).
//
// All times are wall-clock. A result is the median of several samples, each long enough for the
// clock. The tail (p99) comes from separate runs that time each call.

#ifndef PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_
#define PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <semaphore>
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
#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/statistics.h"

namespace pinion {

inline double NowNs() {
  return std::chrono::duration<double, std::nano>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the time between two consecutive readings of the clock.
inline double ClockOverheadNs() {
  static const double overhead = [] {
    std::vector<double> samples(10'001);
    for (double& sample : samples) {
      const double start = NowNs();
      sample = NowNs() - start;
    }
    return Summarize(samples).median;
  }();
  return overhead;
}

// Times single calls, without the time of reading the clock.
class CallTimes {
 public:
  explicit CallTimes(size_t expected) { samples_.reserve(expected); }

  template <typename Call>
  auto Time(const Call& call) {
    struct Note {
      CallTimes& times;
      const double start = NowNs();
      ~Note() { times.samples_.push_back(std::max(0.0, NowNs() - start - ClockOverheadNs())); }
    } note{*this};
    return call();
  }
  void Merge(const CallTimes& other) {
    samples_.insert(samples_.end(), other.samples_.begin(), other.samples_.end());
  }
  double PercentileNs(double fraction) {
    std::sort(samples_.begin(), samples_.end());
    return Quantile(samples_, fraction);
  }

 private:
  std::vector<double> samples_;
};

struct CaseResult {
  double median_ns = 0;  // per allocate + free
  double p99_ns = 0;     // of one call, allocate or free
};

// Memory that a trace's blocks take beyond their sizes.
struct WasteResult {
  double mean_percent = 0;     // booked over requested bytes, over all allocations
  double locked_per_peak = 0;  // locked over peak live bytes; 0: unknown
  uint64_t upstream_bytes = 0;
};

// Pins this thread to a processor of its own, if there are enough. Otherwise the scheduler may run
// all threads of a case on one processor, where they share caches at no cost.
class OnProcessor {
 public:
  explicit OnProcessor(int thread) {
    const cpu_set_t& allowed = Allowed();
    before_ = Affinity();
    int wanted = thread % CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed) || wanted-- > 0) continue;
      cpu_set_t mine;
      CPU_ZERO(&mine);
      CPU_SET(cpu, &mine);
      sched_setaffinity(0, sizeof(mine), &mine);
      return;
    }
  }
  ~OnProcessor() { sched_setaffinity(0, sizeof(before_), &before_); }
  OnProcessor(const OnProcessor&) = delete;
  OnProcessor& operator=(const OnProcessor&) = delete;

  // Returns the number of processors this process may use.
  static int Count() { return CPU_COUNT(&Allowed()); }

 private:
  // Read once: a thread inherits its parent's affinity, which may be one processor.
  static const cpu_set_t& Allowed() {
    static const cpu_set_t allowed = Affinity();
    return allowed;
  }
  static cpu_set_t Affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  }

  cpu_set_t before_;
};

// Waits by spinning, which is short if each thread has a processor. On one processor it yields: a
// spinning thread would delay the thread it waits for.
template <typename Condition>
void SpinUntil(const Condition& condition) {
  const int most_spins = OnProcessor::Count() > 1 ? 10'000 : 0;
  for (int spins = 0; !condition(); ++spins) {
    if (spins >= most_spins) std::this_thread::yield();
  }
}

template <typename Peer>
using Blocks = std::vector<std::optional<typename Peer::Block>>;

// Replays the trace once. `around` makes each call.
template <typename Peer, typename Around>
void Replay(Peer& peer, const AllocationTrace& trace, Blocks<Peer>& blocks, const Around& around) {
  for (const AllocationEvent& event : trace.events) {
    if (event.kind == AllocationEvent::Kind::kAllocate) {
      around([&] { blocks[event.block].emplace(peer.Allocate(event.size_bytes)); });
    } else if (event.kind == AllocationEvent::Kind::kFree) {
      around([&] {
        peer.Free(*std::move(blocks[event.block]));
        blocks[event.block].reset();
      });
    }
  }
}

// Returns the approximate time of one replay.
template <typename Peer>
double ReplayNs(const AllocationTrace& trace) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks(trace.blocks);
  double start = 0;
  for (int i = 0; i < 2; ++i) {
    start = NowNs();
    Replay(peer, trace, blocks, [](const auto& call) { call(); });
  }
  return NowNs() - start;
}

// Measures `threads` threads that replay the trace at once on one allocator.
template <typename Peer>
CaseResult MixedTrace(const AllocationTrace& trace, int threads, int samples) {
  Peer peer(std::make_shared<CopyClock>(0));
  const auto plain = [](const auto& call) { call(); };
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
    Replay(peer, trace, blocks, plain);
    for (double& sample : pair_ns) {
      barrier.arrive_and_wait();
      begin_ns[thread] = NowNs();
      for (int i = 0; i < replays; ++i) Replay(peer, trace, blocks, plain);
      end_ns[thread] = NowNs();
      barrier.arrive_and_wait();
      if (thread == 0) {
        sample = (*std::max_element(end_ns.begin(), end_ns.end()) -
                  *std::min_element(begin_ns.begin(), begin_ns.end())) /
                 static_cast<double>(replays * trace.allocations);
      }
    }
    barrier.arrive_and_wait();
    const auto timed = [&](const auto& call) { thread_calls[thread].Time(call); };
    for (int i = 0; i < replays; ++i) Replay(peer, trace, blocks, timed);
  };
  std::vector<std::jthread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(play, thread);
  play(0);
  others.clear();
  for (const CallTimes& times : thread_calls) calls.Merge(times);
  return {Summarize(pair_ns).median, calls.PercentileNs(0.99)};
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
  const auto run = [&](const auto& around_allocate, const auto& around_free) {
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

  const auto plain = [](const auto& call) { call(); };
  run(plain, plain);
  std::vector<double> pair_ns(samples);
  for (double& sample : pair_ns) {
    const double start = NowNs();
    run(plain, plain);
    sample = (NowNs() - start) / static_cast<double>(kBlocks);
  }
  CallTimes allocations(kBlocks);
  CallTimes frees(kBlocks);
  run([&](const auto& call) { allocations.Time(call); },
      [&](const auto& call) { frees.Time(call); });
  clock->FinishAll();
  allocations.Merge(frees);
  return {Summarize(pair_ns).median, allocations.PercentileNs(0.99)};
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
  std::vector<double> pair_ns(samples);
  for (double& sample : pair_ns) {
    const double start = NowNs();
    for (int i = 0; i < kPairs; ++i) peer.Free(peer.Allocate(kSize));
    sample = (NowNs() - start) / kPairs;
  }
  CallTimes calls(2 * kPairs);
  for (int i = 0; i < kPairs; ++i) {
    auto block = calls.Time([&] { return peer.Allocate(kSize); });
    calls.Time([&] { peer.Free(std::move(block)); });
  }
  for (auto& block : blocks) {
    if (block.has_value()) peer.Free(*std::move(block));
  }
  return {Summarize(pair_ns).median, calls.PercentileNs(0.99)};
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
  std::vector<double> call_ns(samples);
  for (double& sample : call_ns) {
    const double start = NowNs();
    for (int i = 0; i < kCalls; ++i) peer.RecordEvent(pageable.data());
    sample = (NowNs() - start) / kCalls;
  }
  CallTimes calls(kCalls);
  for (int i = 0; i < kCalls; ++i) calls.Time([&] { peer.RecordEvent(pageable.data()); });
  return {Summarize(call_ns).median, calls.PercentileNs(0.99)};
}

template <typename Peer>
WasteResult Waste(const AllocationTrace& trace) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks(trace.blocks);
  uint64_t requested = 0;
  uint64_t booked = 0;
  for (const AllocationEvent& event : trace.events) {
    if (event.kind == AllocationEvent::Kind::kAllocate) {
      blocks[event.block].emplace(peer.Allocate(event.size_bytes));
      requested += event.size_bytes;
      booked += peer.booked_bytes(*blocks[event.block]);
    } else if (event.kind == AllocationEvent::Kind::kFree) {
      peer.Free(*std::move(blocks[event.block]));
      blocks[event.block].reset();
    }
  }
  return {100.0 * (static_cast<double>(booked) / static_cast<double>(requested) - 1),
          static_cast<double>(peer.locked_bytes()) / static_cast<double>(trace.peak_bytes),
          peer.locked_bytes()};
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

// Runs `turn(i)` for each i below `turns` on the next of `threads` threads. Other threads sleep
// meanwhile.
template <typename Turn>
void TakeTurns(int threads, int turns, const Turn& turn) {
  std::deque<std::binary_semaphore> may_run;
  for (int thread = 0; thread < threads; ++thread) may_run.emplace_back(thread == 0 ? 1 : 0);
  std::vector<std::jthread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      const OnProcessor processor(thread);
      for (int i = thread; i < turns; i += threads) {
        may_run[thread].acquire();
        turn(i);
        may_run[(thread + 1) % threads].release();
      }
    });
  }
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
    if (turn < rounds) return Replay(peer, trace, blocks, [](const auto& call) { call(); });
    if (turn >= 2 * rounds) {
      return Replay(peer, trace, blocks, [&](const auto& call) { calls.Time(call); });
    }
    const double start = NowNs();
    Replay(peer, trace, blocks, [](const auto& call) { call(); });
    pair_ns.push_back((NowNs() - start) / static_cast<double>(trace.allocations));
  });
  return {Summarize(pair_ns).median, calls.PercentileNs(0.99)};
}

// Returns locked over peak live bytes of two programs that replay the trace twice each, event by
// event in turn, the second `behind` events later. They run on a thread each, or both on one.
template <typename Peer>
double LockedPerPeakOfTwo(const AllocationTrace& trace, int threads, int behind) {
  Peer peer(std::make_shared<CopyClock>(0));
  Blocks<Peer> blocks[] = {Blocks<Peer>(trace.blocks), Blocks<Peer>(trace.blocks)};
  std::vector<uint64_t> sizes[] = {std::vector<uint64_t>(trace.blocks),
                                   std::vector<uint64_t>(trace.blocks)};
  const auto events = static_cast<int>(trace.events.size());
  uint64_t live_bytes = 0;
  uint64_t peak_bytes = 0;
  TakeTurns(threads, 2 * (2 * events + behind), [&](int turn) {
    const int program = turn % 2;
    const int position = turn / 2 - program * behind;
    if (position < 0 || position >= 2 * events) return;
    const AllocationEvent& event = trace.events[position % events];
    std::optional<typename Peer::Block>& block = blocks[program][event.block];
    if (event.kind == AllocationEvent::Kind::kAllocate) {
      block.emplace(peer.Allocate(event.size_bytes));
      sizes[program][event.block] = event.size_bytes;
      live_bytes += event.size_bytes;
      peak_bytes = std::max(peak_bytes, live_bytes);
    } else if (event.kind == AllocationEvent::Kind::kFree) {
      peer.Free(*std::move(block));
      block.reset();
      live_bytes -= sizes[program][event.block];
    }
  });
  return static_cast<double>(peer.locked_bytes()) / static_cast<double>(peak_bytes);
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
    if (event.size_bytes != 0) event.size_bytes = std::max(event.size_bytes / divisor, uint64_t{1});
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

#endif  // PINION_BENCH_ALLOCATOR_ALLOCATOR_CASES_H_
