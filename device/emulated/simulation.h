// Simulates work on streams:
//
//   time_model        when it runs
//   deferred_effects  when its bytes move
//   race_detector     what it is ordered after
//   host_protection   which host pages the CPU must not touch meanwhile, if enabled
//
// All parts identify a stream by its slot, a small number. The race detector's contexts are slots +
// 1, because its context 0 is the host. An entry has the same sequence number in all parts
// (StreamPoint).
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

// A point of a stream, and everything that it is ordered after.
struct StreamMoment {
  StreamPoint point;
  VectorClock clock;
};

class Simulation {
 public:
  static constexpr int kHost = -1;  // stands for a slot

  // `options` and `trace` (may be null) outlive the simulation.
  Simulation(const EmulatedOptions& options, MachineTrace* trace);

  TimeModel& time() { return time_; }
  // Null without EmulatedOptions::protect_host_pages.
  HostProtection* protection() { return protection_.get(); }
  const std::vector<std::string>& races() const { return races_; }

  int AddStream(int device, const std::string& name);

  // Charges host time for a call.
  void Spend(double us) { time_.Spend(us * 1e-3); }
  // Applies random effects with EffectSchedule::kRandom.
  void ApplySomeAtRandom();

  // --- Work ---
  // Submits an operator that has run on the host, after Force of its stream.
  StreamPoint SubmitKernel(int slot, const Kernel& kernel, double memory_bytes);
  // Submits a copy over a link. With a latency of kForever it never takes effect.
  void SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces, const CopyCost& cost);
  // Submits a copy inside a device, on its compute engine.
  void SubmitCopyInside(int slot, const CopyPiece& piece);
  void HostAccess(const void* data, uint64_t size_bytes, bool write);

  // --- Order ---
  StreamMoment Moment(int slot) const;  // the end of the work submitted so far
  void Wait(int slot, const StreamMoment& moment);
  // Marks a finished moment as seen by the host: forces its effects, joins its clock, and opens the
  // host pages of its copies.
  void Observe(const StreamMoment& moment);
  // Advances time until `point` is done. Unavailable, with the reason, if it never will be.
  absl::Status BlockUntil(StreamPoint point);
  absl::Status Synchronize(int slot);  // blocks until the stream is done, and observes it
  // Applies the effects up to `point`. Returns false if a stuck copy blocks the way.
  bool Force(StreamPoint point) { return effects_.Force(point); }

  // --- Memory whose accesses are checked (EmulatedOptions::detect_races) ---
  // Add and remove checked memory for a stream, or for kHost. Reports call the operation `what`.
  void AddMemory(const void* data, uint64_t size_bytes, int slot, const char* what);
  // Also ordered after the present work of the streams `also`.
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
