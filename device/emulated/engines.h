// Runs kernels and copies on the emulated engines, and computes when they end in virtual time.
//
//   ComputeEngine  one device's kernels, one at a time, in order of arrival
//   CopyEngines    the copies of all devices: a latency phase, then bytes. Copies of one direction
//                  of a device share its bandwidth equally, or run one after the other. The
//                  bandwidth is lower while the other direction moves bytes too, and all devices
//                  of the host share the host's bandwidth (max-min fair)
//
// The caller keeps the clock and must not skip an end: it asks for the next end, advances to it,
// and finishes the due work. A stream has one piece of work on an engine at a time.
//
// All times are in milliseconds, sizes in bytes, rates in bytes per millisecond.
//
// Thread safety: none.

#ifndef PINION_DEVICE_EMULATED_ENGINES_H_
#define PINION_DEVICE_EMULATED_ENGINES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"

namespace pinion {

inline constexpr double kForever = std::numeric_limits<double>::infinity();

struct CopyCost {
  int device = 0;  // owner of the link
  CopyDirection direction = CopyDirection::kHostToDevice;
  uint64_t size_bytes = 0;
  double latency_ms = 0;         // kForever: the copy is stuck
  double rate_limit = kForever;  // of this copy alone, bytes per ms
};

// A kernel or copy that has ended.
struct FinishedWork {
  int stream = 0;
  double start_ms = 0;
};

class ComputeEngine {
 public:
  void Add(int stream, double duration_ms, double now_ms);

  bool idle() const { return kernels_.empty(); }
  // Returns the end of the running kernel; kForever while idle.
  double NextEndMs() const;
  // Removes and returns the kernel that ends now.
  FinishedWork Finish(double now_ms);

 private:
  struct Kernel {
    int stream = 0;
    double duration_ms = 0;
  };

  std::deque<Kernel> kernels_;  // the first one runs
  double start_ms_ = 0;         // of the running kernel
};

class CopyEngines {
 public:
  CopyEngines(const LinkModel& link, int device_count) : link_(link), engines_(2 * device_count) {}

  void Add(int stream, const CopyCost& cost, double now_ms);

  // Returns true if a copy of this direction is in progress.
  bool IsBusy(int device, CopyDirection direction) const;
  // Returns the next end of a latency or copy phase, or kForever.
  double NextEndMs() const;
  // Returns the copies that end now, and starts copies that waited for their engines.
  std::vector<FinishedWork> FinishDue(double now_ms);
  // Recomputes each copy's bandwidth. Call it after all events of `now_ms`, before time passes.
  void ShareLinks(double now_ms);

  // The stream whose copy occupies an engine.
  struct Holder {
    int stream = 0;
    bool is_stuck = false;
  };
  Holder HolderOf(int stream, const CopyCost& cost) const;

 private:
  struct Copy {
    int stream = 0;
    CopyCost cost;
    bool is_moving = false;  // past its latency
    double start_ms = 0;
    double end_ms = 0;           // of its latency, or of its bytes
    double remaining_bytes = 0;  // at `since_ms`
    double rate = 0;
    double since_ms = 0;
  };
  // One direction of a device.
  struct Engine {
    std::deque<Copy> waiting;
    int copying = 0;
    int moving = 0;
  };

  static size_t IndexOf(int device, CopyDirection direction);
  static size_t IndexOf(const CopyCost& cost) { return IndexOf(cost.device, cost.direction); }
  void Start(Copy copy, double now_ms);
  // Returns each moving engine's bandwidth beside all other traffic, by IndexOf.
  std::vector<double> Capacities() const;

  const LinkModel link_;
  std::vector<Engine> engines_;  // by IndexOf
  std::vector<Copy> copies_;     // in progress
  bool links_changed_ = false;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_ENGINES_H_
