#include "pinion/device/emulated/time_model.h"

#include <algorithm>
#include <utility>

namespace pinion {

TimeModel::TimeModel(const LinkModel& link, int device_count)
    : devices_(device_count), copies_(link, device_count) {}

int TimeModel::AddStream(int device, std::string name) {
  streams_.push_back({.device = device, .name = std::move(name)});
  return stream_count() - 1;
}

StreamPoint TimeModel::AddWait(int stream, StreamPoint waited_for) {
  return Add(stream, {.waited_for = waited_for});
}

StreamPoint TimeModel::AddStamp(int stream, std::shared_ptr<double> time_ms) {
  return Add(stream, {.stamp = std::move(time_ms)});
}

StreamPoint TimeModel::AddKernel(int stream, std::string name, uint64_t number,
                                 double duration_ms) {
  ++streams_[stream].kernels_queued;
  return Add(stream, {.kind = Kind::kKernel,
                      .name = std::move(name),
                      .number = number,
                      .duration_ms = duration_ms});
}

StreamPoint TimeModel::AddCopy(int stream, std::string name, uint64_t number,
                               const CopyCost& cost) {
  return Add(stream,
             {.kind = Kind::kCopy, .name = std::move(name), .number = number, .copy = cost});
}

StreamPoint TimeModel::Add(int stream, Entry entry) {
  streams_[stream].queue.push_back(std::move(entry));
  const StreamPoint point = {stream, ++streams_[stream].submitted};
  if (streams_[stream].queue.size() == 1) StartWhatCan();
  return point;
}

void TimeModel::StartWhatCan() {
  for (bool changed = true; changed;) {
    changed = false;
    for (int stream = 0; stream < stream_count(); ++stream) {
      while (TryStart(stream)) changed = true;
    }
  }
  copies_.ShareLinks(now_);
}

// Returns true if the stream's first entry finished at once, so that the next one may start.
bool TimeModel::TryStart(int stream) {
  std::deque<Entry>& queue = streams_[stream].queue;
  if (queue.empty() || queue.front().has_engine) return false;
  Entry& entry = queue.front();
  if (entry.kind == Kind::kWait) {
    if (!Done(entry.waited_for)) return false;
    if (entry.stamp != nullptr) *entry.stamp = now_;
    Finish(stream, now_);
    return true;
  }
  entry.has_engine = true;
  if (entry.kind == Kind::kKernel) {
    devices_[streams_[stream].device].compute.Add(stream, entry.duration_ms, now_);
  } else {
    copies_.Add(stream, entry.copy, now_);
  }
  return false;
}

void TimeModel::Finish(int stream, double start_ms) {
  Stream& state = streams_[stream];
  Entry entry = std::move(state.queue.front());
  state.queue.pop_front();
  ++state.done;
  if (entry.kind == Kind::kWait) return;
  if (entry.kind == Kind::kKernel) {
    --state.kernels_queued;
    ++devices_[state.device].stats.kernels;
  } else {
    TimeStats& stats = devices_[entry.copy.device].stats;
    ++stats.copies;
    (entry.copy.direction == CopyDirection::kHostToDevice ? stats.h2d_bytes : stats.d2h_bytes) +=
        entry.copy.size_bytes;
  }
  if (!on_work_) return;
  on_work_({.device = state.device,
            .stream = stream,
            .name = std::move(entry.name),
            .number = entry.number,
            .is_copy = entry.kind == Kind::kCopy,
            .start_ms = start_ms,
            .end_ms = now_});
}

double TimeModel::NextEventMs() const {
  double next = copies_.NextEndMs();
  for (const DeviceState& device : devices_) next = std::min(next, device.compute.NextEndMs());
  return next;
}

void TimeModel::FinishDue() {
  for (DeviceState& device : devices_) {
    if (device.compute.NextEndMs() > now_) continue;
    const FinishedWork kernel = device.compute.Finish(now_);
    Finish(kernel.stream, kernel.start_ms);
  }
  for (const FinishedWork& copy : copies_.FinishDue(now_)) Finish(copy.stream, copy.start_ms);
}

void TimeModel::AdvanceTo(double ms) {
  for (double next = NextEventMs(); next <= ms; next = NextEventMs()) {
    PassTimeTo(next);
    FinishDue();
    StartWhatCan();
  }
  PassTimeTo(ms);
}

TimeModel::Outcome TimeModel::RunUntil(StreamPoint point, double timeout_ms) {
  const double deadline = now_ + timeout_ms;
  Outcome outcome = Outcome::kDone;
  stream_awaited_by_host_ = point.stream;
  while (outcome == Outcome::kDone && !Done(point)) {
    const double next = NextEventMs();
    if (next > deadline) outcome = Outcome::kTimeout;
    if (next == kForever) outcome = Outcome::kStuck;
    if (const double end = std::min(next, deadline); end != kForever) AdvanceTo(end);
  }
  stream_awaited_by_host_ = kNone;
  return outcome;
}

void TimeModel::PassTimeTo(double ms) {
  const double passed = ms - now_;
  if (passed <= 0) return;
  now_ = ms;
  for (int device = 0; device < static_cast<int>(devices_.size()); ++device) {
    TimeStats& stats = devices_[device].stats;
    if (!devices_[device].compute.idle()) stats.compute_busy_ms += passed;
    if (copies_.IsBusy(device, CopyDirection::kHostToDevice)) stats.h2d_busy_ms += passed;
    if (copies_.IsBusy(device, CopyDirection::kDeviceToHost)) stats.d2h_busy_ms += passed;
  }
  int host_held_up_by = DeviceThatHoldsUpTheHost();
  for (int stream = 0; stream < stream_count(); ++stream) {
    if (streams_[stream].kernels_queued == 0 || !HeldUpByCopy(stream)) continue;
    const int device = streams_[stream].device;
    CountStall(device, stream, passed);
    if (device == host_held_up_by || stream == stream_awaited_by_host_) host_held_up_by = kNone;
  }
  if (host_held_up_by != kNone) CountStall(host_held_up_by, stream_awaited_by_host_, passed);
}

// `stream` is blocked by a copy, and now_ is the end of the passed time.
void TimeModel::CountStall(int device, int stream, double passed_ms) {
  devices_[device].stats.stalled_on_copies_ms += passed_ms;
  if (!on_stall_) return;
  on_stall_({.device = device,
             .name = streams_[RootOf(stream)].queue.front().name,
             .start_ms = now_ - passed_ms,
             .end_ms = now_});
}

int TimeModel::RootOf(int stream) const {
  while (streams_[stream].queue.front().kind == Kind::kWait) {
    stream = streams_[stream].queue.front().waited_for.stream;
  }
  return stream;
}

bool TimeModel::HeldUpByCopy(int stream) const {
  return streams_[RootOf(stream)].queue.front().kind == Kind::kCopy;
}

int TimeModel::DeviceThatHoldsUpTheHost() const {
  if (stream_awaited_by_host_ == kNone || !HeldUpByCopy(stream_awaited_by_host_)) return kNone;
  const int device = streams_[RootOf(stream_awaited_by_host_)].queue.front().copy.device;
  return devices_[device].compute.idle() ? device : kNone;
}

std::string TimeModel::WhyPending(StreamPoint point) const {
  if (Done(point)) return "nothing: it is done";
  // A copy may wait for another copy on its engine.
  CopyEngines::Holder holder = {RootOf(point.stream), /*is_stuck=*/false};
  if (const Entry& first = streams_[holder.stream].queue.front(); first.kind == Kind::kCopy) {
    holder = copies_.HolderOf(holder.stream, first.copy);
  }
  const Stream& root = streams_[holder.stream];
  const Entry& entry = root.queue.front();
  std::string what = entry.name + " #" + std::to_string(entry.number) + " on " + root.name;
  if (root.name != streams_[point.stream].name) {
    what += " (which " + streams_[point.stream].name + " waits for)";
  }
  return what +
         (holder.is_stuck ? ", which is stuck and will never finish" : ", which is still running");
}

}  // namespace pinion
