// The timeline half of MachineCore: what a program says of itself, and what is written of it all.

#include <memory>
#include <string>

#include "pinion/device/emulated/machine_core.h"
#include "pinion/device/trace/chrome_trace.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {
namespace {

// The host's ranges in virtual time. Transfers and stalls are the machine's own knowledge, which
// needs no timed events.
class HostRanges : public TraceSink {
 public:
  explicit HostRanges(MachineCore* machine) : machine_(machine) {}

  void BeginRange(const char* name, uint64_t size_bytes) override {
    machine_->BeginRange(name, size_bytes);
  }
  void EndRange() override { machine_->EndRange(); }
  bool WantsTransfers() const override { return false; }
  void OnTransfer(const TransferRecord&) override {}
  void OnStall(const StallRecord&) override {}

 private:
  MachineCore* const machine_;
};

}  // namespace

std::unique_ptr<TraceSink> MachineCore::NewRanges() { return std::make_unique<HostRanges>(this); }

std::shared_ptr<TraceSink> MachineCore::trace() {
  if (trace_ == nullptr) return nullptr;
  return std::shared_ptr<TraceSink>(shared_from_this(), ranges_.get());
}

void MachineCore::RestartTrace() {
  MutexLock lock(mu_);
  if (trace_ == nullptr) return;
  trace_->Restart(time_.now_ms());
  for (int device = 0; device < options_.device_count; ++device) {
    trace_->OnMemory(device, time_.now_ms(), devices_[device].memory.in_use_bytes);
  }
}

void MachineCore::BeginRange(const char* name, uint64_t size_bytes) {
  MutexLock lock(mu_);
  trace_->BeginRange(name, size_bytes, time_.now_ms());
}

void MachineCore::EndRange() {
  MutexLock lock(mu_);
  trace_->EndRange(time_.now_ms());
}

absl::Status MachineCore::WriteChromeTrace(const std::string& path) const {
  if (trace_ == nullptr) {
    return absl::FailedPreconditionError("there is no trace: set EmulatedOptions::record_trace");
  }
  const ChromeTrace trace = [this] {
    MutexLock lock(mu_);
    return trace_->Finish();
  }();
  return trace.Write(path);
}

}  // namespace pinion
