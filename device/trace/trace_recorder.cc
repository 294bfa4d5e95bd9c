#include "pinion/device/trace/trace_recorder.h"

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion {

TraceRecorder::TraceRecorder(std::string times, int host, std::string host_name, double origin_ms)
    : trace_(std::move(times)), host_(host), origin_ms_(origin_ms) {
  trace_.NameProcess(host_, std::move(host_name));
}

TraceRecorder::Thread& TraceRecorder::CallingThread() {
  const int row = static_cast<int>(threads_.size()) + 1;
  const auto [found, added] = threads_.try_emplace(std::this_thread::get_id(), Thread{row, {}});
  if (added) trace_.NameRow(host_, row, "thread " + std::to_string(row));
  return found->second;
}

void TraceRecorder::Add(ChromeTrace::Slice slice) {
  if (slice.end_ms <= origin_ms_) return;
  slice.start_ms = std::max(slice.start_ms, origin_ms_) - origin_ms_;
  slice.end_ms -= origin_ms_;
  trace_.Add(std::move(slice));
}

void TraceRecorder::BeginRange(const char* name, uint64_t size_bytes, double now_ms) {
  PINION_CHECK(name != nullptr) << "a range has a name";
  CallingThread().open.push_back({name, size_bytes, now_ms});
}

ChromeTrace::Slice TraceRecorder::EndRange(double now_ms) {
  Thread& thread = CallingThread();
  PINION_CHECK(!thread.open.empty()) << "EndRange without BeginRange on this thread";
  const OpenRange range = thread.open.back();
  thread.open.pop_back();
  return {.process = host_,
          .row = thread.row,
          .name = range.name,
          .start_ms = range.start_ms,
          .end_ms = now_ms,
          .size_bytes = range.size_bytes};
}

void TraceRecorder::Restart(double now_ms) {
  trace_.Clear();
  origin_ms_ = now_ms;
}

}  // namespace pinion
