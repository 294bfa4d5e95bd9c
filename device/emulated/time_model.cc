#include "pinion/device/emulated/time_model.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pinion {
namespace {

constexpr double kBytesPerMsOfGbPerS = 1e6;

size_t Index(CopyDirection direction) { return static_cast<size_t>(direction); }

}  // namespace

TimeModel::TimeModel(const LinkModel& link, int device_count)
    : link_(link), devices_(device_count) {}

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
  if (links_changed_) ShareLinks();
}

// True if the first entry of the stream was finished at once, so that the next one has its turn.
bool TimeModel::TryStart(int stream) {
  std::deque<Entry>& queue = streams_[stream].queue;
  if (queue.empty() || queue.front().phase != Phase::kQueued) return false;
  Entry& entry = queue.front();
  DeviceState& device = devices_[streams_[stream].device];
  switch (entry.kind) {
    case Kind::kWait:
      if (!Done(entry.waited_for)) return false;
      Finish(stream);
      return true;
    case Kind::kKernel:
      entry.phase = Phase::kReady;
      device.ready.push_back(stream);
      if (device.ready.size() == 1) RunNextKernel(device);
      break;
    case Kind::kCopy: {
      DeviceState& owner = devices_[entry.copy.device];
      const size_t direction = Index(entry.copy.direction);
      if (link_.one_copy_at_a_time && owner.copying[direction] > 0) {
        entry.phase = Phase::kReady;
        owner.waiting[direction].push_back(stream);
      } else {
        StartCopy(stream);
      }
      break;
    }
  }
  return false;
}

void TimeModel::StartCopy(int stream) {
  Entry& entry = streams_[stream].queue.front();
  entry.phase = Phase::kLatency;
  entry.start = now_;
  entry.end = now_ + entry.copy.latency_ms;
  entry.remaining_bytes = static_cast<double>(entry.copy.size_bytes);
  ++devices_[entry.copy.device].copying[Index(entry.copy.direction)];
  copying_.push_back(stream);
}

void TimeModel::RunNextKernel(DeviceState& device) {
  Entry& kernel = streams_[device.ready.front()].queue.front();
  kernel.start = now_;
  kernel.end = now_ + kernel.duration_ms;
}

void TimeModel::Finish(int stream) {
  Stream& state = streams_[stream];
  Entry entry = std::move(state.queue.front());
  state.queue.pop_front();
  ++state.done;
  if (entry.stamp != nullptr) *entry.stamp = now_;
  if (entry.kind == Kind::kKernel) {
    DeviceState& device = devices_[state.device];
    --state.kernels_queued;
    ++device.stats.kernels;
    device.ready.pop_front();
    if (!device.ready.empty()) RunNextKernel(device);
  } else if (entry.kind == Kind::kCopy) {
    DeviceState& device = devices_[entry.copy.device];
    const size_t direction = Index(entry.copy.direction);
    --device.copying[direction];
    --device.moving[direction];
    links_changed_ = true;
    copying_.erase(std::find(copying_.begin(), copying_.end(), stream));
    if (std::deque<int>& waiting = device.waiting[direction]; !waiting.empty()) {
      StartCopy(waiting.front());
      waiting.pop_front();
    }
    ++device.stats.copies;
    (entry.copy.direction == CopyDirection::kHostToDevice ? device.stats.h2d_bytes
                                                          : device.stats.d2h_bytes) +=
        entry.copy.size_bytes;
  }
  if (on_work_ && (entry.kind == Kind::kKernel || entry.kind == Kind::kCopy)) {
    on_work_({.device = state.device,
              .stream = stream,
              .name = std::move(entry.name),
              .number = entry.number,
              .is_copy = entry.kind == Kind::kCopy,
              .start_ms = entry.start,
              .end_ms = now_});
  }
}

double TimeModel::NextEventMs() const {
  double next = kForever;
  for (const DeviceState& device : devices_) {
    if (!device.ready.empty()) {
      next = std::min(next, streams_[device.ready.front()].queue.front().end);
    }
  }
  for (int stream : copying_) next = std::min(next, streams_[stream].queue.front().end);
  return next;
}

void TimeModel::FinishDueAt(double ms) {
  for (DeviceState& device : devices_) {
    if (device.ready.empty()) continue;
    const int stream = device.ready.front();
    if (streams_[stream].queue.front().end <= ms) Finish(stream);
  }
  for (int stream : std::vector<int>(copying_)) {
    Entry& copy = streams_[stream].queue.front();
    if (copy.end > ms) continue;
    if (copy.phase == Phase::kMoving) {
      Finish(stream);
    } else {
      copy.phase = Phase::kMoving;
      ++devices_[copy.copy.device].moving[Index(copy.copy.direction)];
      links_changed_ = true;
    }
  }
}

void TimeModel::AdvanceTo(double ms) {
  for (double next = NextEventMs(); next <= ms; next = NextEventMs()) {
    PassTimeTo(next);
    FinishDueAt(next);
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
  for (DeviceState& device : devices_) {
    if (!device.ready.empty()) device.stats.compute_busy_ms += passed;
    if (device.copying[Index(CopyDirection::kHostToDevice)] > 0) device.stats.h2d_busy_ms += passed;
    if (device.copying[Index(CopyDirection::kDeviceToHost)] > 0) device.stats.d2h_busy_ms += passed;
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

// `stream` is held up by a copy, and now_ is the end of the time that passed.
void TimeModel::CountStall(int device, int stream, double passed_ms) {
  devices_[device].stats.stalled_on_copies_ms += passed_ms;
  if (!on_stall_) return;
  on_stall_({.device = device,
             .name = streams_[RootOf(stream)].queue.front().name,
             .start_ms = now_ - passed_ms,
             .end_ms = now_});
}

// Gives every moving copy its rate. What a copy has moved so far is settled only when its rate
// changes, so that times do not depend on how often the clock was looked at.
void TimeModel::ShareLinks() {
  links_changed_ = false;
  std::vector<std::array<double, 2>> capacity(devices_.size());
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    const size_t mine = Index(direction);
    const size_t other = 1 - mine;
    const bool h2d = direction == CopyDirection::kHostToDevice;
    std::vector<double*> in_use;
    for (size_t d = 0; d < devices_.size(); ++d) {
      if (devices_[d].moving[mine] == 0) continue;
      const bool duplex = devices_[d].moving[other] > 0;
      capacity[d][mine] = kBytesPerMsOfGbPerS *
                          (duplex ? (h2d ? link_.h2d_duplex_gb_per_s : link_.d2h_duplex_gb_per_s)
                                  : (h2d ? link_.h2d_gb_per_s : link_.d2h_gb_per_s));
      in_use.push_back(&capacity[d][mine]);
    }
    if (link_.host_gb_per_s == 0) continue;
    // Max-min fairness: the slowest first, each gets at most an equal part of what is left.
    std::sort(in_use.begin(), in_use.end(), [](double* a, double* b) { return *a < *b; });
    double left = kBytesPerMsOfGbPerS * link_.host_gb_per_s;
    for (size_t i = 0; i < in_use.size(); ++i) {
      *in_use[i] = std::min(*in_use[i], left / static_cast<double>(in_use.size() - i));
      left -= *in_use[i];
    }
  }
  for (int stream : copying_) {
    Entry& copy = streams_[stream].queue.front();
    if (copy.phase != Phase::kMoving) continue;
    const size_t direction = Index(copy.copy.direction);
    const int sharers = devices_[copy.copy.device].moving[direction];
    const double rate =
        std::min(capacity[copy.copy.device][direction] / sharers, copy.copy.rate_limit);
    if (rate == copy.rate) continue;
    copy.remaining_bytes = std::max(0.0, copy.remaining_bytes - copy.rate * (now_ - copy.since));
    copy.since = now_;
    copy.rate = rate;
    copy.end = now_ + copy.remaining_bytes / rate;
  }
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
  return devices_[device].ready.empty() ? device : kNone;
}

std::string TimeModel::WhyPending(StreamPoint point) const {
  if (Done(point)) return "nothing: it is done";
  int holder = RootOf(point.stream);
  if (const Entry& first = streams_[holder].queue.front();
      first.kind == Kind::kCopy && first.phase == Phase::kReady) {
    // It waits for the copy that has the engine of its direction.
    holder = *std::find_if(copying_.begin(), copying_.end(), [this, &first](int stream) {
      const CopyCost& copy = streams_[stream].queue.front().copy;
      return copy.device == first.copy.device && copy.direction == first.copy.direction;
    });
  }
  const Stream& root = streams_[holder];
  const Entry& entry = root.queue.front();
  std::string what = entry.name + " #" + std::to_string(entry.number) + " on " + root.name;
  if (root.name != streams_[point.stream].name) {
    what += " (which " + streams_[point.stream].name + " waits for)";
  }
  return what + (entry.end == kForever ? ", which is stuck and will never finish"
                                       : ", which is still running");
}

}  // namespace pinion
