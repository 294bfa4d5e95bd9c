#include "pinion/device/trace/chrome_trace_sink.h"

#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr int kHost = 0;
constexpr int kH2dRow = 0;
constexpr int kD2hRow = 1;
constexpr int kFirstStallRow = 2;

int RowOf(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? kH2dRow : kD2hRow;
}

}  // namespace

ChromeTraceSink::ChromeTraceSink(size_t max_slices)
    : max_slices_(max_slices), trace_("measured", kHost, "host", SteadyClockMs()) {}

ChromeTraceSink::DeviceRows& ChromeTraceSink::RowsOf(const std::string& device) {
  const auto [found, added] = devices_.try_emplace(device);
  if (added) {
    const int process = static_cast<int>(devices_.size());
    found->second.process = process;
    trace_.NameProcess(process, device);
    trace_.NameRow(process, kH2dRow, "H2D");
    trace_.NameRow(process, kD2hRow, "D2H");
  }
  return found->second;
}

void ChromeTraceSink::Keep(ChromeTrace::Slice slice) {
  if (trace_.slice_count() < max_slices_) {
    trace_.Add(std::move(slice));
  } else {
    ++dropped_;
  }
}

void ChromeTraceSink::BeginRange(const char* name, uint64_t size_bytes) {
  const double now_ms = SteadyClockMs();
  MutexLock lock(mu_);
  trace_.BeginRange(name, size_bytes, now_ms);
}

void ChromeTraceSink::EndRange() {
  const double now_ms = SteadyClockMs();
  MutexLock lock(mu_);
  Keep(trace_.EndRange(now_ms));
}

void ChromeTraceSink::OnTransfer(const TransferRecord& transfer) {
  MutexLock lock(mu_);
  Keep({.process = RowsOf(transfer.device).process,
        .row = RowOf(transfer.direction),
        .name = std::string("copy ") + CopyDirectionName(transfer.direction),
        .start_ms = transfer.start_ms,
        .end_ms = transfer.end_ms,
        .size_bytes = transfer.size_bytes,
        .transfer_number = transfer.number});
}

void ChromeTraceSink::OnStall(const StallRecord& stall) {
  PINION_CHECK(stall.wait_site != nullptr) << "a stall names its wait, or \"\"";
  MutexLock lock(mu_);
  DeviceRows& rows = RowsOf(stall.device);
  const auto [found, added] = rows.streams.try_emplace(stall.stream.native());
  if (added) {
    const int ordinal = static_cast<int>(rows.streams.size());
    found->second = kFirstStallRow + ordinal - 1;
    trace_.NameRow(rows.process, found->second, "stalls of stream " + std::to_string(ordinal));
  }
  Keep({.process = rows.process,
        .row = found->second,
        .name = stall.wait_site,
        .start_ms = stall.start_ms,
        .end_ms = stall.end_ms,
        .transfer_number = stall.transfer_number});
}

void ChromeTraceSink::Restart() {
  MutexLock lock(mu_);
  trace_.Restart(SteadyClockMs());
  dropped_ = 0;
}

absl::Status ChromeTraceSink::Write(const std::string& path) const {
  const ChromeTrace trace = [this] {
    MutexLock lock(mu_);
    ChromeTrace copy = trace_;
    if (dropped_ > 0) {
      copy.NameProcess(kHost, "host (" + std::to_string(dropped_) + " slices after the first " +
                                  std::to_string(max_slices_) + " were not kept)");
    }
    return copy;
  }();
  return trace.Write(path);
}

}  // namespace pinion
