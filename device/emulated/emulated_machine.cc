#include "pinion/device/emulated/emulated_machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/emulated_device.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/device/emulated/machine_core.h"
#include "pinion/device/emulated/memory_arena.h"
#include "pinion/device/trace/chrome_trace.h"

namespace pinion {
namespace {

// Records the host's ranges in virtual time. The machine itself records transfers and stalls.
class HostRanges : public TraceSink {
 public:
  explicit HostRanges(MachineCore* core) : core_(core) {}

  void BeginRange(const char* name, uint64_t size_bytes) override {
    MutexLock lock(core_->mu);
    core_->SpendOnArithmetic(/*device=*/0);
    core_->trace->BeginRange(name, size_bytes, core_->simulation.time().now_ms());
  }
  void EndRange() override {
    MutexLock lock(core_->mu);
    core_->SpendOnArithmetic(/*device=*/0);
    core_->trace->EndRange(core_->simulation.time().now_ms());
  }
  bool WantsTransfers() const override { return false; }

 private:
  MachineCore* const core_;
};

// Returns the index, for calls without a status; an invalid index is fatal.
int Checked(const MachineCore& core, int device) {
  const absl::Status status = CheckDeviceIndex(device, core.options.device_count);
  PINION_CHECK(status.ok()) << status.message();
  return device;
}

std::string NoSuchStream(const char* call, StreamHandle stream) {
  return absl::StrCat(call, ": no such stream",
                      stream.valid() ? " (destroyed?)" : ": the handle is empty",
                      "; pass one that CreateStream returned");
}

}  // namespace

absl::Status EmulatedOptions::Validate() const {
  if (device_count < 1 || device_count > 64) {
    return absl::InvalidArgumentError("device_count is " + std::to_string(device_count) +
                                      "; it must be between 1 and 64");
  }
  if (memory_bytes == 0 || memory_bytes > (uint64_t{1} << 40)) {
    return absl::InvalidArgumentError("memory_bytes is " + std::to_string(memory_bytes) +
                                      "; it must be between 1 and 1 TiB");
  }
  PINION_RETURN_IF_ERROR(faults.Validate());
  return preset.Validate();
}

absl::StatusOr<std::shared_ptr<EmulatedMachine>> EmulatedMachine::Create(
    const EmulatedOptions& options) {
  PINION_RETURN_IF_ERROR(options.Validate());
  std::vector<std::unique_ptr<MemoryArena>> arenas;
  for (int i = 0; i < options.device_count; ++i) {
    // Reserving addresses takes no memory, even under strict overcommit. Four times the memory
    // keeps fragmentation from causing out-of-memory errors, even after SetMemoryLimit doubles the
    // limit.
    const uint64_t reserve_bytes = std::max(64 * kMiB, 4 * options.memory_bytes);
    void* const mapping =
        mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      return absl::ResourceExhaustedError("cannot reserve " + HumanBytes(reserve_bytes) +
                                          " of addresses for device " + std::to_string(i) + ": " +
                                          std::strerror(errno) +
                                          "; lower EmulatedOptions::memory_bytes, or raise the "
                                          "limit of addresses (ulimit -v)");
    }
    arenas.push_back(std::make_unique<MemoryArena>(mapping, reserve_bytes,
                                                   options.reuse == ReuseMode::kQuarantine));
  }
  return std::shared_ptr<EmulatedMachine>(
      new EmulatedMachine(std::make_unique<MachineCore>(options, std::move(arenas))));
}

EmulatedMachine::EmulatedMachine(std::unique_ptr<MachineCore> core)
    : core_(std::move(core)), ranges_(std::make_unique<HostRanges>(core_.get())) {
  for (int i = 0; i < device_count(); ++i) {
    devices_.push_back(NewEmulatedDevice(this, core_.get(), i));
  }
}

EmulatedMachine::~EmulatedMachine() = default;

const EmulatedOptions& EmulatedMachine::options() const { return core_->options; }

int EmulatedMachine::device_count() const { return core_->options.device_count; }

std::shared_ptr<Device> EmulatedMachine::device(int index) {
  return std::shared_ptr<Device>(shared_from_this(), devices_[Checked(*core_, index)].get());
}

StreamHandle EmulatedMachine::default_stream(int device) {
  return core_->default_streams[Checked(*core_, device)];
}

absl::Status EmulatedMachine::PrepareKernel(int device, StreamHandle stream) {
  MutexLock lock(core_->mu);
  // The operator runs before Launch, so a fault must hit here. Launch charges the time.
  PINION_RETURN_IF_ERROR(core_->Enter(device, DeviceCall::kKernel, /*cost_us=*/0));
  PINION_ASSIGN_OR_RETURN(const HandleTable::Stream* const on, core_->handles.Find(device, stream));
  const TimeModel& time = core_->simulation.time();
  const StreamPoint tail = time.Tail(on->slot);
  if (core_->simulation.Force(tail)) return absl::OkStatus();
  return absl::UnavailableError("a kernel on " + on->name + " can never run: it is behind " +
                                time.WhyPending(tail));
}

absl::Status EmulatedMachine::Launch(int device, StreamHandle stream, const Kernel& kernel) {
  MutexLock lock(core_->mu);
  PINION_RETURN_IF_ERROR(core_->faults.Check(device));
  core_->simulation.Spend(options().preset.host_call_us);
  PINION_ASSIGN_OR_RETURN(const HandleTable::Stream* const on, core_->handles.Find(device, stream));
  for (const double cost : {kernel.flops, kernel.memory_bytes}) {
    if (std::isfinite(cost) && cost >= 0) continue;
    return absl::InvalidArgumentError("kernel " + kernel.name + ": flops or memory_bytes is " +
                                      std::to_string(cost) +
                                      "; they must be finite and at least 0");
  }
  double memory_bytes = 0;
  for (const std::vector<ByteRange>* ranges : {&kernel.reads, &kernel.writes}) {
    for (const ByteRange& range : *ranges) {
      memory_bytes += static_cast<double>(range.size_bytes);
      if (const auto place = core_->Locate(range.data, range.size_bytes); !place.ok()) {
        return absl::InvalidArgumentError("kernel " + kernel.name + ": " +
                                          std::string(place.status().message()));
      }
    }
  }
  if (kernel.memory_bytes > 0) memory_bytes = kernel.memory_bytes;
  core_->simulation.SubmitKernel(on->slot, kernel, memory_bytes);
  return absl::OkStatus();
}

absl::Status EmulatedMachine::Copy(int device, void* dst, const void* src, uint64_t size_bytes,
                                   StreamHandle stream) {
  const DevicePreset& preset = options().preset;
  MutexLock lock(core_->mu);
  PINION_RETURN_IF_ERROR(core_->Enter(device, DeviceCall::kCopy, preset.host_call_us));
  PINION_ASSIGN_OR_RETURN(const HandleTable::Stream* const on, core_->handles.Find(device, stream));
  if (size_bytes == 0) return absl::OkStatus();
  PINION_ASSIGN_OR_RETURN(const MachineCore::Place to, core_->Locate(dst, size_bytes));
  PINION_ASSIGN_OR_RETURN(const MachineCore::Place from, core_->Locate(src, size_bytes));
  const CopyPiece piece = {dst, src, size_bytes};
  if (to.device < 0 && from.device < 0) {
    return absl::InvalidArgumentError(
        "Copy: neither pointer is device memory: pass one that Allocate returned");
  }
  if (to.device == from.device) {
    core_->simulation.SubmitCopyInside(on->slot, piece);
    return absl::OkStatus();
  }
  CopyCost cost;
  cost.size_bytes = size_bytes;
  cost.latency_ms = preset.link.fixed_us * 1e-3;
  const bool h2d = from.device < 0;
  cost.direction = h2d ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost;
  cost.device = h2d ? to.device : from.device;
  const char* name = to.device < 0 ? "copy D2H" : h2d ? "copy H2D" : "copy P2P";
  return core_->SubmitCopy(on->slot, name, {piece}, cost, to.pageable || from.pageable);
}

absl::Status EmulatedMachine::RecordStream(const void* data, StreamHandle stream) {
  MutexLock lock(core_->mu);
  const int device = core_->DeviceOf(data);
  if (device < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("RecordStream: 0x", absl::Hex(reinterpret_cast<uintptr_t>(data)),
                     " is not device memory; pass an address that Allocate returned"));
  }
  PINION_RETURN_IF_ERROR(core_->faults.Check(device));
  const HandleTable::Stream* const user = core_->handles.FindOnAnyDevice(stream);
  if (user == nullptr) return absl::InvalidArgumentError(NoSuchStream("RecordStream", stream));
  return core_->heaps[device].RecordStream(data, user->slot);
}

absl::Status EmulatedMachine::HostAccess(const void* data, uint64_t size_bytes, bool write) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  if (size_bytes > UINTPTR_MAX - begin || (data == nullptr && size_bytes > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("HostAccess: no memory has ", size_bytes,
                                                   " bytes from ", begin,
                                                   " on: pass memory of the host"));
  }
  MutexLock lock(core_->mu);
  if (const int device = core_->DeviceOf(data); device >= 0) {
    return absl::InvalidArgumentError("HostAccess: this is memory of " +
                                      EmulatedDeviceName(device) + ": pass memory of the host");
  }
  core_->simulation.HostAccess(data, size_bytes, write);
  return absl::OkStatus();
}

absl::Status EmulatedMachine::SynchronizeDevice(int device) {
  MutexLock lock(core_->mu);
  PINION_RETURN_IF_ERROR(
      core_->Enter(device, DeviceCall::kSynchronize, options().preset.host_event_us));
  for (int slot = 0; slot < core_->simulation.time().stream_count(); ++slot) {
    if (core_->simulation.time().device(slot) != device) continue;
    PINION_RETURN_IF_ERROR(core_->simulation.Synchronize(slot));
  }
  return absl::OkStatus();
}

double EmulatedMachine::now_ms() const {
  MutexLock lock(core_->mu);
  core_->SpendOnArithmetic(/*device=*/0);
  return core_->simulation.time().now_ms();
}

MemoryStats EmulatedMachine::memory_stats(int device) const {
  MutexLock lock(core_->mu);
  return core_->heaps[Checked(*core_, device)].GetStats();
}

void EmulatedMachine::ResetPeakMemory(int device) {
  MutexLock lock(core_->mu);
  core_->heaps[Checked(*core_, device)].ResetPeak();
}

TimeStats EmulatedMachine::time_stats(int device) const {
  MutexLock lock(core_->mu);
  return core_->simulation.time().stats(Checked(*core_, device));
}

void EmulatedMachine::ResetTimeStats(int device) {
  MutexLock lock(core_->mu);
  core_->simulation.time().ResetStats(Checked(*core_, device));
}

std::string EmulatedMachine::MemoryReport(int device) const {
  MutexLock lock(core_->mu);
  return core_->heaps[Checked(*core_, device)].Report();
}

absl::Status EmulatedMachine::SetMemoryLimit(int device, uint64_t limit_bytes) {
  PINION_RETURN_IF_ERROR(CheckDeviceIndex(device, device_count()));
  if (limit_bytes > 2 * options().memory_bytes) {
    return absl::InvalidArgumentError(
        "SetMemoryLimit: " + HumanBytes(limit_bytes) + " is more than twice memory_bytes (" +
        HumanBytes(options().memory_bytes) + "); create the machine with more");
  }
  MutexLock lock(core_->mu);
  core_->heaps[device].SetLimit(limit_bytes);
  return absl::OkStatus();
}

bool EmulatedMachine::IsDevicePointer(const void* data, int* device) const {
  const int found = core_->DeviceOf(data);
  if (found >= 0 && device != nullptr) *device = found;
  return found >= 0;
}

bool EmulatedMachine::IsPinned(const void* data) const {
  MutexLock lock(core_->mu);
  return core_->pinned.Find(data, 1) == PinnedRanges::Overlap::kInside;
}

std::vector<std::string> EmulatedMachine::races() const {
  MutexLock lock(core_->mu);
  return core_->simulation.races();
}

uint64_t EmulatedMachine::calls(DeviceCall call) const {
  MutexLock lock(core_->mu);
  return core_->faults.calls(call);
}

absl::Status EmulatedMachine::SetCapturing(StreamHandle stream, bool capturing) {
  MutexLock lock(core_->mu);
  HandleTable::Stream* const found = core_->handles.FindOnAnyDevice(stream);
  if (found == nullptr) return absl::InvalidArgumentError(NoSuchStream("SetCapturing", stream));
  found->capturing = capturing;
  return absl::OkStatus();
}

void EmulatedMachine::BreakDevice(int device, const std::string& error) {
  MutexLock lock(core_->mu);
  core_->faults.Break(Checked(*core_, device), error);
}

std::shared_ptr<TraceSink> EmulatedMachine::trace() {
  if (core_->trace == nullptr) return nullptr;
  return std::shared_ptr<TraceSink>(shared_from_this(), ranges_.get());
}

void EmulatedMachine::RestartTrace() {
  MutexLock lock(core_->mu);
  if (core_->trace == nullptr) return;
  core_->trace->Restart(core_->simulation.time().now_ms());
  for (DeviceHeap& heap : core_->heaps) heap.TraceInUse();
}

absl::Status EmulatedMachine::WriteChromeTrace(const std::string& path) const {
  if (core_->trace == nullptr) {
    return absl::FailedPreconditionError("there is no trace: set EmulatedOptions::record_trace");
  }
  const ChromeTrace trace = [this] {
    MutexLock lock(core_->mu);
    return core_->trace->Finish();
  }();
  return trace.Write(path);
}

}  // namespace pinion
