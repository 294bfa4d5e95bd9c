#include "pinion/device/emulated/machine_core.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/emulated_device.h"

namespace pinion {

MachineCore::MachineCore(const EmulatedOptions& options,
                         std::vector<std::unique_ptr<MemoryArena>> arenas)
    : options_(options),
      arenas_(std::move(arenas)),
      ranges_(NewRanges()),
      time_(options.preset.link, options.device_count),
      effects_(options.seed),
      protection_(options.protect_host_pages ? std::make_unique<HostProtection>() : nullptr),
      faults_(options.faults),
      trace_(options.record_trace ? std::make_unique<MachineTrace>() : nullptr),
      devices_(options.device_count) {
  MutexLock lock(mu_);
  if (trace_ != nullptr) {
    time_.set_observer([this](const TimedWork& work) ABSL_NO_THREAD_SAFETY_ANALYSIS {
      trace_->OnDone(streams_[work.stream].device, work);
    });
    time_.set_stall_observer([this](const TimedStall& stall) ABSL_NO_THREAD_SAFETY_ANALYSIS {
      trace_->OnStall(stall.device, stall);
    });
  }
  for (int device = 0; device < options_.device_count; ++device) {
    facades_.push_back(std::make_unique<EmulatedDevice>(this, device));
    if (trace_ != nullptr) {
      trace_->NameDevice(device, DeviceName(device) + ", " + options_.preset.description);
    }
    devices_[device].limit_bytes = options_.memory_bytes;
    devices_[device].default_stream = AddStream(device, "default");
  }
}

MachineCore::~MachineCore() = default;

std::string MachineCore::DeviceName(int device) const { return "emu:" + std::to_string(device); }

std::shared_ptr<Device> MachineCore::device(int index) {
  PINION_CHECK(index >= 0 && index < device_count())
      << "no device emu:" << index << "; there are " << device_count();
  return std::shared_ptr<Device>(shared_from_this(), facades_[index].get());
}

StreamHandle MachineCore::default_stream(int device) {
  MutexLock lock(mu_);
  return devices_[device].default_stream;
}

absl::Status MachineCore::CheckUsable(int device) const {
  const std::string& error = devices_[device].sticky_error;
  return error.empty() ? absl::OkStatus() : absl::InternalError(error);
}

absl::Status MachineCore::Enter(int device, DeviceCall call, double cost_us) {
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  time_.Spend(cost_us * 1e-3);
  if (options_.schedule == EffectSchedule::kRandom) effects_.ApplySome();
  const std::optional<Fault> fault = faults_.Count(call);
  if (!fault.has_value()) return absl::OkStatus();
  const std::string message = DeviceName(device) + ": " + DeviceCallName(call) + " call " +
                              std::to_string(faults_.calls(call)) + " failed (injected, " +
                              (fault->sticky ? "sticky)" : "transient)");
  if (fault->sticky) {
    devices_[device].sticky_error = message + "; every later call of the device fails too";
    return CheckUsable(device);
  }
  return call == DeviceCall::kAllocate || call == DeviceCall::kPin
             ? absl::ResourceExhaustedError(message)
             : absl::UnavailableError(message);
}

absl::StatusOr<int> MachineCore::FindSlot(int device, StreamHandle stream) const {
  const auto it = slots_.find(stream.native());
  if (it == slots_.end()) {
    return absl::InvalidArgumentError(DeviceName(device) + ": no such stream" +
                                      (stream.valid() ? " (destroyed?)" : ": the handle is empty"));
  }
  if (streams_[it->second].device != device) {
    return absl::InvalidArgumentError("stream " + streams_[it->second].name +
                                      " was used with device " + DeviceName(device));
  }
  return it->second;
}

absl::StatusOr<MachineCore::EventState*> MachineCore::FindEvent(EventHandle event) {
  const auto it = events_.find(event.native());
  if (it != events_.end()) return &it->second;
  return absl::InvalidArgumentError(event.valid() ? "no such event (destroyed?)"
                                                  : "the event handle is empty");
}

void MachineCore::DeliverRaces() {
  for (std::string& report : detector_.TakeReports()) {
    if (options_.abort_on_race) {
      PINION_LOG(kError) << report << " (emulated accelerator, seed " << options_.seed << ")";
      std::abort();
    }
    races_.push_back(std::move(report));
  }
}

void MachineCore::Observe(StreamPoint point, const VectorClock& clock) {
  PINION_CHECK(effects_.Force(point)) << "finished work cannot be stuck";
  detector_.Join(RaceDetector::kHost, clock);
  if (protection_ != nullptr) protection_->OpenSeen(detector_.Clock(RaceDetector::kHost));
}

absl::Status MachineCore::BlockUntil(StreamPoint point) {
  if (time_.RunUntil(point, TimeModel::kForever) == TimeModel::Outcome::kDone) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(streams_[point.stream].name +
                                " cannot be waited for: it is behind " + time_.WhyPending(point));
}

absl::Status MachineCore::Synchronize(int slot) {
  const StreamPoint tail = time_.Tail(slot);
  PINION_RETURN_IF_ERROR(BlockUntil(tail));
  Observe(tail, detector_.Clock(ContextOf(slot)));
  return absl::OkStatus();
}

// --- Streams ---

StreamHandle MachineCore::AddStream(int device, const std::string& name) {
  const std::string full_name = DeviceName(device) + "/" + name;
  const int slot = time_.AddStream(device, full_name);
  detector_.AddContext(full_name);  // ContextOf(slot)
  streams_.push_back({device, full_name, false});
  if (trace_ != nullptr) trace_->NameStream(device, slot, full_name);
  void* const native = reinterpret_cast<void*>(next_handle_ += 16);
  slots_[native] = slot;
  return StreamHandle(native);
}

absl::StatusOr<StreamHandle> MachineCore::CreateStream(int device, const std::string& name) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kCreateStream, options_.preset.host_event_us));
  return AddStream(device, name);
}

absl::Status MachineCore::DestroyStream(int device, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  PINION_RETURN_IF_ERROR(FindSlot(device, stream).status());
  if (stream == devices_[device].default_stream) {
    return absl::InvalidArgumentError(DeviceName(device) + ": the default stream is not yours");
  }
  slots_.erase(stream.native());  // what is submitted goes on, as on a real device
  return absl::OkStatus();
}

absl::Status MachineCore::SynchronizeStream(int device, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kSynchronize, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  return Synchronize(slot);
}

absl::Status MachineCore::SynchronizeDevice(int device) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kSynchronize, options_.preset.host_event_us));
  for (int slot = 0; slot < static_cast<int>(streams_.size()); ++slot) {
    if (streams_[slot].device == device) PINION_RETURN_IF_ERROR(Synchronize(slot));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> MachineCore::IsCapturing(int device, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  return streams_[slot].capturing;
}

absl::Status MachineCore::SetCapturing(StreamHandle stream, bool capturing) {
  MutexLock lock(mu_);
  const auto it = slots_.find(stream.native());
  if (it == slots_.end()) return absl::InvalidArgumentError("SetCapturing: no such stream");
  streams_[it->second].capturing = capturing;
  return absl::OkStatus();
}

// --- Events ---

absl::StatusOr<EventHandle> MachineCore::CreateEvent(int device, bool timed) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kCreateEvent, options_.preset.host_event_us));
  void* const native = reinterpret_cast<void*>(next_handle_ += 16);
  events_[native].device = device;
  if (timed) events_[native].time_ms = std::make_shared<double>(-1);
  return EventHandle(native);
}

absl::Status MachineCore::DestroyEvent(int device, EventHandle event) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  PINION_RETURN_IF_ERROR(FindEvent(event).status());
  events_.erase(event.native());
  return absl::OkStatus();
}

absl::Status MachineCore::RecordEvent(int device, EventHandle event, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kRecordEvent, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(EventState* const state, FindEvent(event));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  if (state->device != device) {
    return absl::InvalidArgumentError("an event of " + DeviceName(state->device) +
                                      " cannot be recorded on " + streams_[slot].name);
  }
  state->recorded = true;
  state->captured = streams_[slot].capturing;
  if (state->time_ms != nullptr) {
    state->time_ms = std::make_shared<double>(-1);
    time_.AddStamp(slot, state->time_ms);
  }
  state->point = time_.Tail(slot);
  state->clock = detector_.Clock(ContextOf(slot));
  return absl::OkStatus();
}

absl::Status MachineCore::StreamWaitEvent(int device, StreamHandle stream, EventHandle event) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(
      Enter(device, DeviceCall::kStreamWaitEvent, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(EventState* const state, FindEvent(event));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  if (!state->recorded) return absl::OkStatus();
  if (streams_[slot].capturing != state->captured) {
    // CUDA fails the first, which breaks the capture, and draws the second into it: no program
    // wants either.
    return absl::FailedPreconditionError(
        state->captured
            ? streams_[slot].name + " cannot wait for an event that a graph has captured"
            : streams_[slot].name + " captures a graph and cannot wait for work outside of it");
  }
  const StreamPoint point = time_.AddWait(slot, state->point);
  effects_.AddWait(point, state->point);
  detector_.Join(ContextOf(slot), state->clock);
  return absl::OkStatus();
}

absl::StatusOr<bool> MachineCore::QueryEvent(int device, EventHandle event) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kQueryEvent, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(EventState* const state, FindEvent(event));
  if (state->captured) {
    return absl::FailedPreconditionError(
        "the event was recorded by a stream that captures a graph; it cannot be queried");
  }
  if (!state->recorded) return true;
  if (!time_.Done(state->point)) return false;
  Observe(state->point, state->clock);
  return true;
}

absl::Status MachineCore::WaitEvent(int device, EventHandle event, absl::Duration timeout) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kWaitEvent, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(EventState* const state, FindEvent(event));
  if (state->captured) {
    return absl::FailedPreconditionError(
        "the event was recorded by a stream that captures a graph; it cannot be waited for");
  }
  if (!state->recorded) return absl::OkStatus();
  const double timeout_ms = std::max(0.0, absl::ToDoubleMilliseconds(timeout));
  if (time_.RunUntil(state->point, timeout_ms) != TimeModel::Outcome::kDone) {
    return absl::DeadlineExceededError("the event on " + streams_[state->point.stream].name +
                                       " is not done after " + absl::FormatDuration(timeout) +
                                       ": it is behind " + time_.WhyPending(state->point));
  }
  Observe(state->point, state->clock);
  return absl::OkStatus();
}

absl::StatusOr<double> MachineCore::ElapsedMs(int device, EventHandle start, EventHandle end) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kQueryEvent, options_.preset.host_event_us));
  PINION_ASSIGN_OR_RETURN(EventState* const first, FindEvent(start));
  PINION_ASSIGN_OR_RETURN(EventState* const second, FindEvent(end));
  for (const EventState* event : {first, second}) {
    if (event->time_ms == nullptr || !event->recorded) {
      return absl::InvalidArgumentError(
          "ElapsedMs: an event without timing, or one that was never recorded");
    }
    if (*event->time_ms < 0) {
      return absl::UnavailableError("ElapsedMs: the event on " +
                                    streams_[event->point.stream].name + " is not done");
    }
  }
  return *second->time_ms - *first->time_ms;
}

// --- What tests and reports read ---

void MachineCore::BreakDevice(int device, const std::string& error) {
  MutexLock lock(mu_);
  if (devices_[device].sticky_error.empty()) devices_[device].sticky_error = error;
}

DeviceInfo MachineCore::Info(int device) const {
  const LinkModel& link = options_.preset.link;
  return {.model = options_.preset.description,
          .link = link.kind,
          .link_name = link.name,
          .rated_gb_per_s = link.rated_gb_per_s,
          .modelled = true};
}

double MachineCore::now_ms() const {
  MutexLock lock(mu_);
  return time_.now_ms();
}

TimeStats MachineCore::time_stats(int device) const {
  MutexLock lock(mu_);
  return time_.stats(device);
}

void MachineCore::ResetTimeStats(int device) {
  MutexLock lock(mu_);
  time_.ResetStats(device);
}

std::vector<std::string> MachineCore::races() const {
  MutexLock lock(mu_);
  return races_;
}

uint64_t MachineCore::calls(DeviceCall call) const {
  MutexLock lock(mu_);
  return faults_.calls(call);
}

}  // namespace pinion
