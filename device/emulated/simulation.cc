#include "pinion/device/emulated/simulation.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {

Simulation::Simulation(const EmulatedOptions& options, MachineTrace* trace)
    : options_(options),
      trace_(trace),
      time_(options.preset.link, options.device_count),
      effects_(options.seed),
      protection_(options.protect_host_pages ? std::make_unique<HostProtection>() : nullptr) {
  if (trace_ == nullptr) return;
  time_.Observe([this](const TimedWork& work) { trace_->OnDone(work); },
                [this](const TimedStall& stall) { trace_->OnStall(stall); });
}

int Simulation::AddStream(int device, const std::string& name) {
  const int slot = time_.AddStream(device, name);
  detector_.AddContext(name);  // ContextOf(slot)
  if (trace_ != nullptr) trace_->NameStream(device, slot, name);
  return slot;
}

void Simulation::ApplySomeAtRandom() {
  if (options_.schedule == EffectSchedule::kRandom) effects_.ApplySome();
}

StreamPoint Simulation::SubmitKernel(int slot, const Kernel& kernel, double memory_bytes) {
  const uint64_t number = detector_.Begin(ContextOf(slot), kernel.name);
  for (const ByteRange& range : kernel.reads) detector_.Read(range.data, range.size_bytes);
  for (const ByteRange& range : kernel.writes) detector_.Write(range.data, range.size_bytes);
  DeliverRaces();
  if (trace_ != nullptr) trace_->WillRun(number, static_cast<uint64_t>(memory_bytes));
  return time_.AddKernel(slot, kernel.name, number,
                         KernelMs(options_.preset, kernel.flops, memory_bytes, kernel.type));
}

void Simulation::SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces,
                            const CopyCost& cost) {
  const int context = ContextOf(slot);
  const uint64_t number = detector_.Begin(context, name);
  for (const CopyPiece& piece : pieces) {
    detector_.Read(piece.src, piece.size_bytes);
    detector_.Write(piece.dst, piece.size_bytes);
  }
  DeliverRaces();
  if (trace_ != nullptr) trace_->WillCopy(number, cost.direction, pieces);
  if (protection_ != nullptr) {
    const HostProtection::Moment moment = {context, detector_.Clock(context).Get(context)};
    const std::string what = name + " #" + std::to_string(number) + " on " + time_.name(slot);
    for (CopyPiece& piece : pieces) piece = protection_->Close(piece, moment, what);
  }
  // Their order is undefined, so use one that careless callers do not expect.
  std::reverse(pieces.begin(), pieces.end());
  const StreamPoint point = time_.AddCopy(slot, std::move(name), number, cost);
  if (cost.latency_ms == kForever) {
    effects_.AddObstacle(point);
  } else {
    effects_.AddCopy(point, std::move(pieces));
  }
  AfterSubmission(point);
}

void Simulation::SubmitCopyInside(int slot, const CopyPiece& piece) {
  Kernel kernel;
  kernel.name = "copy D2D";
  kernel.reads = {{piece.src, piece.size_bytes}};
  kernel.writes = {{piece.dst, piece.size_bytes}};
  const StreamPoint point = SubmitKernel(slot, kernel, 2 * static_cast<double>(piece.size_bytes));
  effects_.AddCopy(point, {piece});
  AfterSubmission(point);
}

void Simulation::AfterSubmission(StreamPoint point) {
  if (options_.schedule == EffectSchedule::kEarly) effects_.Force(point);
}

void Simulation::HostAccess(const void* data, uint64_t size_bytes, bool write) {
  detector_.Begin(RaceDetector::kHost, "host access");
  write ? detector_.Write(data, size_bytes) : detector_.Read(data, size_bytes);
  DeliverRaces();
}

StreamMoment Simulation::Moment(int slot) const {
  return {time_.Tail(slot), detector_.Clock(ContextOf(slot))};
}

void Simulation::Wait(int slot, const StreamMoment& moment) {
  effects_.AddWait(time_.AddWait(slot, moment.point), moment.point);
  detector_.Join(ContextOf(slot), moment.clock);
}

void Simulation::Observe(const StreamMoment& moment) {
  PINION_CHECK(effects_.Force(moment.point)) << "finished work cannot be stuck";
  detector_.Join(RaceDetector::kHost, moment.clock);
  if (protection_ != nullptr) protection_->OpenSeen(detector_.Clock(RaceDetector::kHost));
}

absl::Status Simulation::BlockUntil(StreamPoint point) {
  if (time_.RunUntil(point, kForever) == TimeModel::Outcome::kDone) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(time_.name(point.stream) + " cannot be waited for: it is behind " +
                                time_.WhyPending(point));
}

absl::Status Simulation::Synchronize(int slot) {
  const StreamMoment end = Moment(slot);
  PINION_RETURN_IF_ERROR(BlockUntil(end.point));
  Observe(end);
  return absl::OkStatus();
}

void Simulation::AddMemory(const void* data, uint64_t size_bytes, int slot, const char* what) {
  if (options_.detect_races) detector_.AddMemory(data, size_bytes, ContextOf(slot), what);
}

void Simulation::RemoveMemory(const void* data, int slot, const std::set<int>& also,
                              const char* what) {
  if (!options_.detect_races) return;
  std::vector<int> contexts;
  for (int other : also) contexts.push_back(ContextOf(other));
  detector_.RemoveMemory(data, ContextOf(slot), contexts, what);
  DeliverRaces();
}

void Simulation::DeliverRaces() {
  for (std::string& report : detector_.TakeReports()) {
    if (options_.abort_on_race) {
      PINION_LOG(kError) << report << " (emulated accelerator, seed " << options_.seed << ")";
      std::abort();
    }
    races_.push_back(std::move(report));
  }
}

}  // namespace pinion
