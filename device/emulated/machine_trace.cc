#include "pinion/device/emulated/machine_trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

// Rows beside those of streams, whose numbers are small.
constexpr int kStallRow = 100'000;
constexpr int kHost = 100'000;  // the process
constexpr int kPinRow = 0;

// Stalls are told in parts. One goes on where the next part begins.
constexpr double kSameMomentMs = 1e-9;

uintptr_t FirstByte(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

void MachineTrace::WillCopyOut(uint64_t number, absl::Span<const CopyPiece> pieces) {
  Submitted& copy = submitted_[number];
  copy.arrow_from = number;
  for (const CopyPiece& piece : pieces) {
    copy.size_bytes += piece.size_bytes;
    const uintptr_t begin = FirstByte(piece.dst), end = begin + piece.size_bytes;
    auto old = copied_out_.upper_bound(begin);
    if (old != copied_out_.begin() && std::prev(old)->second.end > begin) --old;
    while (old != copied_out_.end() && old->first < end) old = copied_out_.erase(old);
    copied_out_[begin] = {end, number};
  }
}

void MachineTrace::WillCopyIn(uint64_t number, absl::Span<const CopyPiece> pieces) {
  Submitted& copy = submitted_[number];
  for (const CopyPiece& piece : pieces) {
    copy.size_bytes += piece.size_bytes;
    auto out = copied_out_.upper_bound(FirstByte(piece.src));
    if (out == copied_out_.begin()) continue;
    --out;
    if (FirstByte(piece.src) >= out->second.end) continue;
    // An arrow has the number of the copy out that it begins at. Chunks of one copy may follow.
    copy.arrow_to = out->second.number;
  }
}

void MachineTrace::OnDone(int device, const TimedWork& work) {
  const Submitted submitted = submitted_[work.number];
  submitted_.erase(work.number);
  Add({.process = device,
       .row = work.stream,
       .name = work.name,
       .start_ms = work.start_ms,
       .end_ms = work.end_ms,
       .size_bytes = submitted.size_bytes,
       .operator_name = work.is_copy ? "" : work.name,
       .arrow_from = submitted.arrow_from,
       .arrow_to = submitted.arrow_to});
}

void MachineTrace::OnStall(int device, const TimedStall& stall) {
  const auto [found, added] = stalls_.try_emplace(device);
  if (added) trace_.NameRow(device, kStallRow, "stalls: compute or the host waits for a copy");
  ChromeTrace::Slice& last = found->second;
  const std::string name = "waits for " + stall.name;
  if (last.name == name && stall.start_ms <= last.end_ms + kSameMomentMs) {
    last.end_ms = std::max(last.end_ms, stall.end_ms);
    return;
  }
  // Two streams that wait at once are one stall of the device.
  const double start_ms = std::max(stall.start_ms, last.end_ms);
  if (start_ms >= stall.end_ms) return;
  Add(std::move(last));
  last = {.process = device,
          .row = kStallRow,
          .name = name,
          .start_ms = start_ms,
          .end_ms = stall.end_ms};
}

void MachineTrace::OnMemory(int device, double now_ms, uint64_t in_use_bytes) {
  trace_.Add(ChromeTrace::Sample{.process = device,
                                 .name = "device memory",
                                 .time_ms = std::max(0.0, now_ms - origin_ms_),
                                 .value_bytes = in_use_bytes});
}

void MachineTrace::OnPin(double start_ms, double end_ms, uint64_t size_bytes) {
  if (end_ms == start_ms) return;
  NameHost();
  Add({.process = kHost,
       .row = kPinRow,
       .name = "pin host memory",
       .start_ms = start_ms,
       .end_ms = end_ms,
       .size_bytes = size_bytes});
}

void MachineTrace::BeginRange(const char* name, uint64_t size_bytes, double now_ms) {
  CallingThread().open.push_back({name, size_bytes, now_ms});
}

void MachineTrace::EndRange(double now_ms) {
  Thread& thread = CallingThread();
  PINION_CHECK(!thread.open.empty()) << "EndRange without BeginRange on this thread";
  const OpenRange range = thread.open.back();
  thread.open.pop_back();
  Add({.process = kHost,
       .row = thread.row,
       .name = range.name,
       .start_ms = range.start_ms,
       .end_ms = now_ms,
       .size_bytes = range.size_bytes});
}

void MachineTrace::Restart(double now_ms) {
  trace_.Clear();
  for (auto& [device, stall] : stalls_) stall = {};
  origin_ms_ = now_ms;
}

ChromeTrace MachineTrace::Finish() const {
  MachineTrace whole = *this;
  for (auto& [device, stall] : whole.stalls_) whole.Add(std::move(stall));
  return std::move(whole.trace_);
}

void MachineTrace::Add(ChromeTrace::Slice slice) {
  if (slice.name.empty() || slice.end_ms <= origin_ms_) return;
  slice.start_ms = std::max(slice.start_ms, origin_ms_) - origin_ms_;
  slice.end_ms -= origin_ms_;
  trace_.Add(std::move(slice));
}

MachineTrace::Thread& MachineTrace::CallingThread() {
  const auto [found, added] = threads_.try_emplace(std::this_thread::get_id());
  if (added) {
    NameHost();
    found->second.row = static_cast<int>(threads_.size());
    trace_.NameRow(kHost, found->second.row, "thread " + std::to_string(found->second.row));
  }
  return found->second;
}

void MachineTrace::NameHost() {
  if (host_named_) return;
  host_named_ = true;
  trace_.NameProcess(kHost, "host, in modelled time");
  trace_.NameRow(kHost, kPinRow, "pinning");
}

}  // namespace pinion
