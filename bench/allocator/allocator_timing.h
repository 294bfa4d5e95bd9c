// Times of calls and of threads, for allocator_bench.
//
// All times are wall-clock. A result is the median of several samples, each long enough for the
// clock. The tail (p99) comes from separate runs that time each call.

#ifndef PINION_BENCH_ALLOCATOR_ALLOCATOR_TIMING_H_
#define PINION_BENCH_ALLOCATOR_ALLOCATOR_TIMING_H_

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "pinion/bench/goals.h"

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

  // Makes the call, and returns its result.
  template <typename Call>
  auto operator()(const Call& call) {
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

// Makes the call, untimed.
inline constexpr auto kUntimed = [](const auto& call) { call(); };

struct CaseResult {
  double median_ns = 0;  // per allocate + free
  double p99_ns = 0;     // of one call, allocate or free

  CaseResult(std::vector<double> pair_ns, CallTimes& calls)
      : median_ns(Summarize(std::move(pair_ns)).median), p99_ns(calls.PercentileNs(0.99)) {}
};

// Returns the times of `samples` runs, divided by `pairs`.
template <typename Run>
std::vector<double> SamplesNs(int samples, uint64_t pairs, const Run& run) {
  std::vector<double> pair_ns(samples);
  for (double& sample : pair_ns) {
    const double start = NowNs();
    run();
    sample = (NowNs() - start) / static_cast<double>(pairs);
  }
  return pair_ns;
}

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

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_ALLOCATOR_TIMING_H_
