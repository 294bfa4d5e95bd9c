// What is submitted to streams, in the three respects in which it is simulated:
//
//   time_model        when it happens
//   deferred_effects  when its bytes move
//   race_detector     what it is ordered after
//   host_protection   which host pages the CPU must leave alone meanwhile, if asked for
//
// All of them know a stream by the same small number, its slot; the race detector's contexts are
// slots + 1, since its context 0 is the host. Each entry of a stream has the same sequence number
// everywhere (StreamPoint).
//
// Thread safety: none; the machine's mutex guards it.

#ifndef PINION_DEVICE_EMULATED_SIMULATION_H_
#define PINION_DEVICE_EMULATED_SIMULATION_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/deferred_effects.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/host_protection.h"
#include "pinion/device/emulated/machine_trace.h"
#include "pinion/device/emulated/race_detector.h"
#include "pinion/device/emulated/time_model.h"

namespace pinion {

// How far a stream had come when an event was recorded, and what it was ordered after by then.
struct StreamMoment {
  StreamPoint point;
  VectorClock clock;
};

class Simulation {
 public:
  static constexpr int kHost = -1;  // in a slot's place

  // `options` and `trace` (null: none) outlive the simulation.
  Simulation(const EmulatedOptions& options, MachineTrace* trace);

  TimeModel& time() { return time_; }
  // Null unless EmulatedOptions::protect_host_pages.
  HostProtection* protection() { return protection_.get(); }
  const std::vector<std::string>& races() const { return races_; }

  int AddStream(int device, const std::string& name);

  // The host spends time on a call.
  void Spend(double us) { time_.Spend(us * 1e-3); }
  // Effects that happen to happen now, by EffectSchedule::kRandom.
  void ApplySomeAtRandom();

  // --- Work ---
  // An operator that has run on the host, after Force of its stream.
  StreamPoint SubmitKernel(int slot, const Kernel& kernel, double memory_bytes);
  // A copy over a link. One whose latency is kForever never takes effect.
  void SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces, const CopyCost& cost);
  // A copy inside a device, by its compute engine.
  void SubmitCopyInside(int slot, const CopyPiece& piece);
  void HostAccess(const void* data, uint64_t size_bytes, bool write);

  // --- Order ---
  StreamMoment Moment(int slot) const;  // the end of what was submitted so far
  void Wait(int slot, const StreamMoment& moment);
  // The host has seen that the moment, which is done, is: forces its effects, joins its clock, and
  // opens the host pages of the copies that it covers.
  void Observe(const StreamMoment& moment);
  // Passes time until `point` is done. Unavailable, saying why, if it never will be.
  absl::Status BlockUntil(StreamPoint point);
  absl::Status Synchronize(int slot);  // blocks until the stream is done, and observes it
  // Applies the effects up to `point`. False if something stuck is in the way.
  bool Force(StreamPoint point) { return effects_.Force(point); }

  // --- Memory whose accesses are checked (EmulatedOptions::detect_races) ---
  // `slot` is the stream, or the host, for which it comes and goes; `what` names that in reports.
  void AddMemory(const void* data, uint64_t size_bytes, int slot, const char* what);
  // After what the streams `also` have come to, too.
  void RemoveMemory(const void* data, int slot, const std::set<int>& also, const char* what);

 private:
  static int ContextOf(int slot) { return slot + 1; }
  void DeliverRaces();
  void AfterSubmission(StreamPoint point);

  const EmulatedOptions& options_;
  MachineTrace* const trace_;
  TimeModel time_;
  DeferredEffects effects_;
  RaceDetector detector_;
  const std::unique_ptr<HostProtection> protection_;
  std::vector<std::string> races_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_SIMULATION_H_
