// Simulates virtual time: streams, compute engines and links as discrete events.
//
// The host clock is the present. A submitted entry starts when its stream reaches it, the work it
// waits for is done, and its engine is free (engines.h). A wait takes no time. Time advances only
// when the host spends time on a call (Spend) or blocks (RunUntil).
//
// All times are in milliseconds.
//
// Thread safety: none.

#ifndef PINION_DEVICE_EMULATED_TIME_MODEL_H_
#define PINION_DEVICE_EMULATED_TIME_MODEL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/time_stats.h"

namespace pinion {

// A finished kernel or copy.
struct TimedWork {
  int device = 0;  // of the stream
  int stream = 0;
  std::string name;
  uint64_t number = 0;
  bool is_copy = false;
  double start_ms = 0;
  double end_ms = 0;
};

// A part of the time in TimeStats::stalled_on_copies_ms.
struct TimedStall {
  int device = 0;
  std::string name;  // name of the copy that is waited for
  double start_ms = 0;
  double end_ms = 0;
};

class TimeModel {
 public:
  TimeModel(const LinkModel& link, int device_count);

  // Sets the observers. `on_work` is called for each finished kernel or copy, `on_stall` for each
  // part of a stall as time passes.
  void Observe(std::function<void(const TimedWork&)> on_work,
               std::function<void(const TimedStall&)> on_stall) {
    on_work_ = std::move(on_work);
    on_stall_ = std::move(on_stall);
  }

  // Adds a stream; streams are numbered from 0.
  int AddStream(int device, std::string name);
  int stream_count() const { return static_cast<int>(streams_.size()); }
  int device(int stream) const { return streams_[stream].device; }
  const std::string& name(int stream) const { return streams_[stream].name; }

  // Append an entry and return its point. `name` and `number` identify the entry in messages.
  StreamPoint AddWait(int stream, StreamPoint waited_for);
  // Sets `*time_ms` to the time at which the stream reaches the entry.
  StreamPoint AddStamp(int stream, std::shared_ptr<double> time_ms);
  StreamPoint AddKernel(int stream, std::string name, uint64_t number, double duration_ms);
  StreamPoint AddCopy(int stream, std::string name, uint64_t number, const CopyCost& cost);

  // Returns the last entry of a stream.
  StreamPoint Tail(int stream) const { return {stream, streams_[stream].submitted}; }
  bool Done(StreamPoint point) const { return streams_[point.stream].done >= point.seq; }

  double now_ms() const { return now_; }
  void Spend(double ms) { AdvanceTo(now_ + ms); }
  // Charges host arithmetic, which the device's statistics count.
  void SpendOnArithmetic(int device, double ms) {
    Spend(ms);
    devices_[device].stats.host_arithmetic_ms += ms;
  }

  // Blocks the host until `point` is done or `timeout_ms` have passed. kStuck: the point can never
  // be reached; then time passes only if the timeout is finite.
  enum class Outcome { kDone, kTimeout, kStuck };
  Outcome RunUntil(StreamPoint point, double timeout_ms);

  // Returns the obstacle of `point`: "copy D2H #12 on emu:0/d2h, which is stuck".
  std::string WhyPending(StreamPoint point) const;

  const TimeStats& stats(int device) const { return devices_[device].stats; }
  void ResetStats(int device) { devices_[device].stats = TimeStats(); }

 private:
  enum class Kind { kWait, kKernel, kCopy };
  struct Entry {
    Kind kind = Kind::kWait;
    bool has_engine = false;  // or is queued for it
    std::string name = {};
    uint64_t number = 0;
    StreamPoint waited_for = {};         // default: done from the start
    std::shared_ptr<double> stamp = {};  // set by stamps only
    double duration_ms = 0;              // of kernels
    CopyCost copy = {};
  };
  struct Stream {
    int device = 0;
    std::string name;
    std::deque<Entry> queue = {};  // the first entry is in progress or blocked
    uint64_t submitted = 0;
    uint64_t done = 0;
    uint64_t kernels_queued = 0;
  };
  struct DeviceState {
    ComputeEngine compute;
    TimeStats stats;
  };

  StreamPoint Add(int stream, Entry entry);
  void AdvanceTo(double ms);
  double NextEventMs() const;
  void PassTimeTo(double ms);  // counts busy and stalled time; requires no event before `ms`
  void FinishDue();
  void StartWhatCan();
  bool TryStart(int stream);
  void Finish(int stream, double start_ms);
  // Follows waits from the head of `stream` (not idle) to the stream whose first entry blocks it.
  // It exists, because a wait ends when its target is done.
  int RootOf(int stream) const;
  bool HeldUpByCopy(int stream) const;
  void CountStall(int device, int stream, double passed_ms);
  // Returns the device whose copy the blocked host waits for while compute is idle, or kNone.
  int DeviceThatHoldsUpTheHost() const;

  static constexpr int kNone = -1;

  double now_ = 0;
  std::vector<Stream> streams_;
  std::vector<DeviceState> devices_;
  CopyEngines copies_;
  int stream_awaited_by_host_ = kNone;
  std::function<void(const TimedWork&)> on_work_;
  std::function<void(const TimedStall&)> on_stall_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_TIME_MODEL_H_
