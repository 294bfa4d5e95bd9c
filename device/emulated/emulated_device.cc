#include "pinion/device/emulated/emulated_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/emulated/engines.h"

namespace pinion {
namespace {

// Keeps the machine alive, because allocators hold pinned memory longer than devices live.
class EmulatedPinnedSource : public HostMemorySource {
 public:
  EmulatedPinnedSource(std::shared_ptr<EmulatedMachine> machine, MachineCore* core, int device)
      : machine_(std::move(machine)), core_(core), device_(device) {}

  std::string name() const override { return "emulated pinned"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return MachineCore::kPageBytes; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    PINION_RETURN_IF_ERROR(CheckSize(size_bytes));
    {
      MutexLock lock(core_->mu);
      PINION_RETURN_IF_ERROR(core_->EnterPin(device_, size_bytes));
    }
    TwoViews views;
    if (core_->options.protect_host_pages) {
      PINION_ASSIGN_OR_RETURN(views, MapTwice(size_bytes));
    } else {
      views.program =
          mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    void* const data = views.program;
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError("the host has no " + HumanBytes(size_bytes) +
                                          " for emulated pinned memory: " + std::strerror(errno));
    }
    MutexLock lock(core_->mu);
    HostProtection* const protection = core_->simulation.protection();
    if (protection != nullptr) protection->AddSegment(views, size_bytes);
    core_->pinned.Add(data, size_bytes);
    return HostSegment{data, size_bytes, -1};
  }
  absl::Status Free(const HostSegment& segment) override {
    void* machine_view = nullptr;
    {
      MutexLock lock(core_->mu);
      PINION_RETURN_IF_ERROR(core_->faults.Check(device_));
      if (segment.size_bytes == 0 || core_->pinned.SizeAt(segment.data) != segment.size_bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("this machine has no pinned segment of ", HumanBytes(segment.size_bytes),
                         " at 0x", absl::Hex(reinterpret_cast<uintptr_t>(segment.data)),
                         ": free each segment that Allocate returned, unchanged and once"));
      }
      PINION_RETURN_IF_ERROR(core_->pinned.Remove(segment.data));
      HostProtection* const protection = core_->simulation.protection();
      if (protection != nullptr) machine_view = protection->RemoveSegment(segment.data);
    }
    if (machine_view != nullptr) {
      PINION_CHECK(munmap(machine_view, segment.size_bytes) == 0);
    }
    PINION_CHECK(munmap(segment.data, segment.size_bytes) == 0);
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<EmulatedMachine> machine_;
  MachineCore* const core_;
  const int device_;
};

class EmulatedDevice : public Device {
 public:
  EmulatedDevice(EmulatedMachine* machine, MachineCore* core, int index)
      : machine_(machine), core_(core), index_(index) {}

  std::string name() const override { return EmulatedDeviceName(index_); }

  DeviceInfo info() const override {
    const LinkModel& link = core_->options.preset.link;
    return {.model = core_->options.preset.description,
            .link = link.kind,
            .link_name = link.name,
            .rated_gb_per_s = link.rated_gb_per_s,
            .modelled = true};
  }

  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override {
    const std::string& label = AllocationLabel::Current();
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kAllocate));
    PINION_ASSIGN_OR_RETURN(const Stream* const owner, core_->handles.Find(index_, stream));
    return core_->heaps[index_].Allocate(size_bytes, label, owner->slot);
  }

  absl::Status Free(void* data, StreamHandle stream) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(core_->faults.Check(index_));
    core_->simulation.Spend(core_->options.preset.host_event_us);
    PINION_ASSIGN_OR_RETURN(const Stream* const owner, core_->handles.Find(index_, stream));
    return core_->heaps[index_].Free(data, owner->slot);
  }

  std::shared_ptr<HostMemorySource> pinned_source() override {
    return std::make_shared<EmulatedPinnedSource>(machine_->shared_from_this(), core_, index_);
  }

  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kCreateStream));
    return core_->AddStream(index_, name);
  }

  absl::Status DestroyStream(StreamHandle stream) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(core_->faults.Check(index_));
    PINION_RETURN_IF_ERROR(core_->handles.Find(index_, stream).status());
    if (stream == core_->default_streams[index_]) {
      return absl::InvalidArgumentError(
          name() +
          ": the default stream is not yours: destroy the ones that CreateStream returned");
    }
    core_->handles.Remove(stream);  // submitted work goes on, as on a real device
    return absl::OkStatus();
  }

  absl::Status SynchronizeStream(StreamHandle stream) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kSynchronize));
    PINION_ASSIGN_OR_RETURN(const Stream* const found, core_->handles.Find(index_, stream));
    return core_->simulation.Synchronize(found->slot);
  }

  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(core_->faults.Check(index_));
    PINION_ASSIGN_OR_RETURN(const Stream* const found, core_->handles.Find(index_, stream));
    return found->capturing;
  }

  absl::StatusOr<EventHandle> CreateEvent() override { return AddEvent(nullptr); }
  absl::StatusOr<EventHandle> CreateTimedEvent() override {
    return AddEvent(std::make_shared<double>(-1));
  }

  absl::Status DestroyEvent(EventHandle event) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(core_->faults.Check(index_));
    PINION_RETURN_IF_ERROR(core_->handles.Find(event).status());
    core_->handles.Remove(event);
    return absl::OkStatus();
  }

  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kRecordEvent));
    PINION_ASSIGN_OR_RETURN(Event* const state, core_->handles.Find(event));
    PINION_ASSIGN_OR_RETURN(const Stream* const on, core_->handles.Find(index_, stream));
    if (state->device != index_) {
      return absl::InvalidArgumentError("an event of " + EmulatedDeviceName(state->device) +
                                        " cannot be recorded on " + on->name + ": record one of " +
                                        name());
    }
    state->recorded = true;
    state->captured = on->capturing;
    if (state->time_ms != nullptr) {
      state->time_ms = std::make_shared<double>(-1);
      core_->simulation.time().AddStamp(on->slot, state->time_ms);
    }
    state->moment = core_->simulation.Moment(on->slot);
    return absl::OkStatus();
  }

  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kStreamWaitEvent));
    PINION_ASSIGN_OR_RETURN(const Event* const state, core_->handles.Find(event));
    PINION_ASSIGN_OR_RETURN(const Stream* const waiting, core_->handles.Find(index_, stream));
    if (!state->recorded) return absl::OkStatus();
    if (waiting->capturing != state->captured) {
      // CUDA fails the first case, which breaks the capture, and draws the second into the capture.
      return absl::FailedPreconditionError(
          waiting->name + (state->captured
                               ? " cannot wait for an event that a graph has captured"
                               : " captures a graph and cannot wait for work outside of it"));
    }
    core_->simulation.Wait(waiting->slot, state->moment);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> QueryEvent(EventHandle event) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kQueryEvent));
    PINION_ASSIGN_OR_RETURN(const Event* const state, FindForHost(event, "queried"));
    if (!core_->simulation.time().Done(state->moment.point)) return false;
    core_->simulation.Observe(state->moment);
    return true;
  }

  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kWaitEvent));
    PINION_ASSIGN_OR_RETURN(const Event* const state, FindForHost(event, "waited for"));
    TimeModel& time = core_->simulation.time();
    const StreamPoint point = state->moment.point;
    const double timeout_ms = std::max(0.0, absl::ToDoubleMilliseconds(timeout));
    if (time.RunUntil(point, timeout_ms) != TimeModel::Outcome::kDone) {
      return absl::DeadlineExceededError("the event on " + time.name(point.stream) +
                                         " is not done after " + absl::FormatDuration(timeout) +
                                         ": it is behind " + time.WhyPending(point));
    }
    core_->simulation.Observe(state->moment);
    return absl::OkStatus();
  }

  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kQueryEvent));
    PINION_ASSIGN_OR_RETURN(const Event* const first, core_->handles.Find(start));
    PINION_ASSIGN_OR_RETURN(const Event* const second, core_->handles.Find(end));
    if (first->device != second->device) {
      return absl::InvalidArgumentError("ElapsedMs: the events are of " +
                                        EmulatedDeviceName(first->device) + " and " +
                                        EmulatedDeviceName(second->device) +
                                        ", not of one device: pass two that one device recorded");
    }
    for (const Event* event : {first, second}) {
      if (event->time_ms == nullptr || !event->recorded) {
        return absl::InvalidArgumentError(
            "ElapsedMs: an event without timing, or one that was never recorded: pass events that "
            "CreateTimedEvent returned and RecordEvent recorded");
      }
      if (*event->time_ms < 0) {
        return absl::UnavailableError("ElapsedMs: the event on " +
                                      core_->simulation.time().name(event->moment.point.stream) +
                                      " is not done");
      }
    }
    return *second->time_ms - *first->time_ms;
  }

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    const DevicePreset& preset = core_->options.preset;
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(core_->Enter(index_, DeviceCall::kCopy, preset.host_call_us));
    PINION_ASSIGN_OR_RETURN(const Stream* const on, core_->handles.Find(index_, stream));
    if (pieces.empty()) return absl::InvalidArgumentError("CopyAsync: no pieces: give one or more");
    CopyCost cost;
    cost.device = index_;
    cost.direction = direction;
    bool pageable = false;
    for (const CopyPiece& piece : pieces) {
      if (piece.size_bytes == 0) {
        return absl::InvalidArgumentError("CopyAsync: a piece has size_bytes 0: leave it out");
      }
      const bool h2d = direction == CopyDirection::kHostToDevice;
      PINION_ASSIGN_OR_RETURN(const MachineCore::Place on_device,
                              core_->Locate(h2d ? piece.dst : piece.src, piece.size_bytes));
      PINION_ASSIGN_OR_RETURN(const MachineCore::Place on_host,
                              core_->Locate(h2d ? piece.src : piece.dst, piece.size_bytes));
      if (on_device.device != index_ || on_host.device >= 0) {
        return absl::InvalidArgumentError(
            std::string("CopyAsync ") + CopyDirectionName(direction) + " on " + name() +
            ": one end of each piece must be its memory and the other the host's");
      }
      pageable |= on_host.pageable;
      cost.size_bytes += piece.size_bytes;
    }
    cost.latency_ms =
        (preset.link.fixed_us + static_cast<double>(pieces.size() - 1) * preset.link.piece_us) *
        1e-3;
    return core_->SubmitCopy(on->slot, std::string("copy ") + CopyDirectionName(direction),
                             {pieces.begin(), pieces.end()}, cost, pageable);
  }

 private:
  using Stream = HandleTable::Stream;
  using Event = HandleTable::Event;

  // Enters a call with the host's cost of an event. Copies and pinning have costs of their own.
  absl::Status Enter(DeviceCall call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_->mu) {
    return core_->Enter(index_, call, core_->options.preset.host_event_us);
  }

  // Returns the event for a host query or wait. CUDA refuses both for captured events.
  absl::StatusOr<const Event*> FindForHost(EventHandle event, const char* what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_->mu) {
    PINION_ASSIGN_OR_RETURN(const Event* const state, core_->handles.Find(event));
    if (!state->captured) return state;
    return absl::FailedPreconditionError(
        std::string("the event was recorded by a stream that captures a graph; it cannot be ") +
        what);
  }

  absl::StatusOr<EventHandle> AddEvent(std::shared_ptr<double> time_ms) {
    MutexLock lock(core_->mu);
    PINION_RETURN_IF_ERROR(Enter(DeviceCall::kCreateEvent));
    return core_->handles.Add(Event{.device = index_, .time_ms = std::move(time_ms)});
  }

  EmulatedMachine* const machine_;
  MachineCore* const core_;
  const int index_;
};

}  // namespace

std::unique_ptr<Device> NewEmulatedDevice(EmulatedMachine* machine, MachineCore* core, int index) {
  return std::make_unique<EmulatedDevice>(machine, core, index);
}

}  // namespace pinion
