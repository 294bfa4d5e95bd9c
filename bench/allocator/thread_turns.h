// Cases of allocator_bench in which threads take turns, as in a program whose steps run on one
// thread after another.

#ifndef PINION_BENCH_ALLOCATOR_THREAD_TURNS_H_
#define PINION_BENCH_ALLOCATOR_THREAD_TURNS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <semaphore>
#include <thread>
#include <vector>

#include "pinion/bench/allocator/allocation_trace.h"
#include "pinion/bench/allocator/allocator_cases.h"
#include "pinion/bench/allocator/latency.h"
#include "pinion/bench/allocator/peers.h"
#include "pinion/bench/statistics.h"

namespace pinion {

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

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_THREAD_TURNS_H_
