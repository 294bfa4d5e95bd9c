#include "pinion/hooks/plan/device_recording.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/memory_observer.h"

namespace pinion {
namespace {

constexpr absl::Duration kFinishTimeout = absl::Minutes(1);

constexpr char kNoEnd[] = "the end of a backward was not recorded";
constexpr char kNoRelease[] = "the release of a saved tensor was not recorded";
constexpr char kNotAside[] = "step recording: this step's compute includes offload work";

// Runs `work` where nothing may be thrown. `failure` says what an exception means.
void RunLoggingErrors(const char* failure, absl::FunctionRef<void()> work) {
  try {
    work();
  } catch (const std::exception& error) {
    PINION_LOG(kWarning) << failure << ": " << error.what();
  }
}

}  // namespace

uint32_t DeviceRecording::NewNumber() {
  static std::atomic<uint32_t> last{0};
  return ++last;
}

absl::Status DeviceRecording::CheckNotCapturing() const {
  PINION_ASSIGN_OR_RETURN(const bool capturing,
                          clock_->IsCapturing(NativeStream(CurrentStream(device_))));
  if (!capturing) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the current stream of ", device_.str(),
                   " captures a graph: finish the record of the step once that has ended"));
}

void DeviceRecording::Abandon() {
  std::vector<NotedEntry> entries;  // destroyed after the lock, with their events
  MutexLock lock(mu_);
  finished_ = true;
  entries.swap(entries_);
}

void DeviceRecording::Start() {
  // An event captured by a graph has no time.
  if (!IsRecording()) return;
  const StreamClock::Moment now = clock_->Now(NativeStream(CurrentStream(device_)));
  MutexLock lock(mu_);
  if (entries_.empty()) entries_.push_back({.begin = now, .end = now});
}

bool DeviceRecording::IsRecording() {
  if (has_no_end_ && !finished_) Abandon();
  if (finished_) return false;
  const absl::StatusOr<bool> capturing = clock_->IsCapturing(NativeStream(CurrentStream(device_)));
  return capturing.ok() && !*capturing;
}

// Counts the bytes after the event, as End() does before its own: the host's time for that is not
// the step's.
DeviceRecording::Moment DeviceRecording::Begin() {
  StreamClock::Moment time = clock_->Now(NativeStream(CurrentStream(device_)));
  Moment moment = CountBytes();
  moment.time = std::move(time);
  return moment;
}

DeviceRecording::Moment DeviceRecording::End() {
  Moment moment = CountBytes();
  moment.time = clock_->Now(NativeStream(CurrentStream(device_)));
  return moment;
}

void DeviceRecording::BeginUnobserved() {
  MutexLock lock(mu_);
  is_unobserved_ = true;
}

DeviceRecording::Moment DeviceRecording::CountBytes() {
  AllocatorBytes allocator = AllocatorBytesOf(device_);
  allocator.streamed = streamed_bytes();
  if (share_ != nullptr) {
    allocator.streamed_allocated = static_cast<int64_t>(share_->allocated_bytes());
  }
  const int64_t allocated_bytes = allocator.current - allocator.streamed;
  MutexLock lock(mu_);
  DevicePeaks::Since since = peaks_.Take(allocated_bytes, allocator.frees);
  const std::optional<AllocatorBytes> last = std::exchange(last_, allocator);
  if (std::exchange(is_unobserved_, false) && last.has_value()) {
    const auto most_bytes = [&](int64_t peak_bytes) {
      return MostBytesBesideStreamed(*last, allocator, {peak_bytes, since.added_bytes});
    };
    since.peak_bytes = most_bytes(since.peak_bytes);
    for (DevicePeaks::Freed& freed : since.freed) {
      freed.later_peak_bytes = most_bytes(freed.later_peak_bytes);
    }
  }
  KnownStorages::Bytes bytes = objects_.storages().CountAfter(allocated_bytes, since.told);
  if (!since.told_all) bytes = objects_.storages().CountAt(allocated_bytes);
  objects_.NoteLetGo(since, uses_, entries_.size(), peaks_);
  return {.time = {}, .bytes = bytes, .peak_bytes = objects_.PeakHadCopiesStayed(since)};
}

DeviceRecording::ObjectId DeviceRecording::ObjectOf(const Saved& saved) {
  std::optional<ObjectId> found;
  if (saved.noted == nullptr) {
    found = objects_.Find(saved.tensor);
  } else if (const std::optional<ObjectId> noted = saved.noted->In(number_)) {
    if (objects_.Contains(*noted, saved.tensor)) found = noted;
  }
  if (found.has_value()) return *found;
  const ObjectId id = objects_.Add(saved.tensor, saved.place, saved.is_leaf, uses_);
  if (saved.noted != nullptr) saved.noted->Set(number_, id);
  return id;
}

DeviceRecording::ObjectId DeviceRecording::EndSave(const Moment& begin, const Saved& saved,
                                                   const SavedTensor& handle,
                                                   const std::optional<SegmentPart>& part) {
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return 0;  // the id is never used
  const ObjectId id = ObjectOf(saved);
  NotedObject& object = objects_[id];
  objects_.storages().NoteAllocations(begin.bytes, end.bytes);
  const int64_t other_bytes = objects_.storages().OtherBytes(end.bytes);
  objects_.Hold(id, peaks_);
  object.is_computed_again =
      handle.IsComputedAgain() && (object.handles == 1 || object.is_computed_again);
  object.last_save = uses_;
  Append(begin, end, {.used = id, .by = saved.place / 2, .part = part});
  // The object counts in the whole interval since the last access, so its bytes are removed from
  // the interval's other bytes.
  const int64_t object_bytes = other_bytes - entries_.back().other_bytes;
  auto entry = entries_.rbegin();
  entry->peak_other_bytes -= object_bytes;
  while (++entry != entries_.rend() && !entry->used.has_value()) {
    entry->peak_other_bytes -= object_bytes;
    entry->other_bytes -= object_bytes;
  }
  object.saved.push_back(&handle);  // last, so that an exception leaves nothing registered
  return id;
}

DeviceRecording::Moment DeviceRecording::BeginRead() {
  const int64_t backward = CurrentBackward();
  bool is_first = false;
  if (backward != -1) {
    MutexLock lock(mu_);
    is_first = endings_.try_emplace(backward).second;
  }
  // Before the packer can register its own callback: callbacks run in order of registration.
  if (is_first) {
    AtEndOfBackward([self = shared_from_this(), backward] { self->BeginEnding(backward); });
  }
  return Begin();
}

void DeviceRecording::EndRead(const Moment& begin, ObjectId object, const at::Tensor& tensor,
                              const SavedTensor& handle, const std::optional<SegmentPart>& part) {
  const Moment end = End();
  const int64_t backward = CurrentBackward();
  const bool into_graph = BackwardMakesGraph();
  const bool is_user_code = IsReadByUserCode();
  bool is_first = false;
  {
    MutexLock lock(mu_);
    if (finished_) return;
    objects_.storages().NoteAllocations(begin.bytes, end.bytes);
    // With gradients enabled the reader may save the tensor in another graph.
    objects_.NoteRead(object, tensor, /*reader_keeps=*/c10::GradMode::is_enabled(), peaks_);
    if (is_user_code) objects_[object].planned.comes_alone = true;
    Append(begin, end,
           {.used = object,
            .computed_again = handle.WasComputedAgain(),
            .into_graph = into_graph,
            // A node that runs a backward of its own keeps what it has read until that has ended:
            // all of it is the work of one operator.
            .by = ~OutermostBackwardNode(),
            .part = part});
    const auto ending = endings_.find(backward);
    is_first = ending != endings_.end() && !std::exchange(ending->second.has_end, true);
  }
  if (is_first) {
    AtEndOfBackward([self = shared_from_this(), backward] { self->EndEnding(backward); });
  }
}

void DeviceRecording::BeginEnding(int64_t backward) {
  RunLoggingErrors(kNoEnd, [&] {
    if (!IsRecording()) return;
    const Moment begin = Begin();
    MutexLock lock(mu_);
    endings_[backward].begin = begin;
  });
}

void DeviceRecording::EndEnding(int64_t backward) {
  Ending ending;
  {
    MutexLock lock(mu_);
    ending = std::exchange(endings_[backward], {});
    endings_.erase(backward);
    objects_.DecideReleased();
  }
  RunLoggingErrors(kNoEnd, [&] {
    if (!ending.begin.has_value() || !IsRecording()) return;
    EndAside(*ending.begin);
    MutexLock lock(mu_);
    step_entries_ = entries_.size();
  });
}

void DeviceRecording::EndAside(const Moment& begin) {
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return;
  objects_.storages().NoteAllocations(begin.bytes, end.bytes);
  Append(begin, end, {});
}

void DeviceRecording::NoteSegment(const SegmentBegin& segment, uint32_t ordinal,
                                  uint64_t min_bytes) {
  if (!IsRecording()) return;
  const Moment begin = Begin();
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return;
  objects_.storages().NoteAllocations(begin.bytes, end.bytes);
  for (const at::Tensor& input : segment.inputs) {
    if (!input.defined() || input.device() != device_ || !IsPlainTensor(input)) continue;
    objects_.AddInput(input, ordinal, min_bytes, uses_);
  }
  Append(begin, end, {.begins = ordinal, .part = CurrentPart(device_)});
}

void DeviceRecording::ForgetHandle(ObjectId id, const SavedTensor& handle) {
  MutexLock lock(mu_);
  objects_.ForgetHandle(id, handle);
}

void DeviceRecording::EndRelease(const Moment& begin, ObjectId id) {
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return;
  objects_.storages().NoteAllocations(begin.bytes, end.bytes);
  NotedEntry what;
  if (objects_.Release(id, uses_)) what.released = id;
  Append(begin, end, std::move(what));
}

void DeviceRecording::Append(const Moment& begin, const Moment& end, NotedEntry what) {
  what.begin = begin.time;
  what.end = end.time;
  what.peak_other_bytes = begin.peak_bytes;
  what.object_bytes = end.bytes.allocated - objects_.storages().OtherBytes(end.bytes);
  // Objects released since the last entry count in the whole interval, so they are no other bytes.
  if (!entries_.empty()) what.peak_other_bytes -= entries_.back().object_bytes;
  what.other_bytes = objects_.storages().OtherBytes(end.bytes);
  if (what.used.has_value()) ++uses_;
  if (entries_.empty()) entries_.push_back({.begin = begin.time, .end = begin.time});
  const bool is_of_step = what.used.has_value() || what.released.has_value();
  entries_.push_back(std::move(what));
  if (is_of_step) step_entries_ = entries_.size();
  has_no_end_ = entries_.size() >= kMaxEntries;
}

absl::StatusOr<StepTrace> DeviceRecording::Finish() {
  {
    // No upper bound is needed of what came behind the step.
    MutexLock lock(mu_);
    is_unobserved_ = false;
  }
  const Moment end = Begin();
  std::vector<StreamClock::Moment> moments;
  {
    MutexLock lock(mu_);
    if (finished_) {
      return absl::FailedPreconditionError(
          absl::StrCat("the step's record was finished before, or abandoned at ", kMaxEntries,
                       " saves, reads and releases"));
    }
    finished_ = true;
    Append(end, end, {});
    // What the program allocates behind the step's last backward is not the step's.
    for (size_t i = step_entries_; i < entries_.size(); ++i) {
      const int64_t step_bytes = entries_[step_entries_ - 1].other_bytes;
      entries_[i].other_bytes = std::min(entries_[i].other_bytes, step_bytes);
      entries_[i].peak_other_bytes = std::min(entries_[i].peak_other_bytes, step_bytes);
    }
    for (const NotedEntry& entry : entries_) {
      moments.push_back(entry.begin);
      moments.push_back(entry.end);
    }
    objects_.End(uses_);
  }
  PINION_ASSIGN_OR_RETURN(const StreamClock::Times times, clock_->Read(moments, kFinishTimeout));
  MutexLock lock(mu_);
  return StepOf(entries_, objects_.all(), objects_.inputs(), times);
}

at::Tensor RecordedTensor::Unpack() {
  if (!recording_->IsRecording()) return saved_->Unpack();
  const DeviceRecording::Moment begin = recording_->BeginRead();
  at::Tensor tensor = saved_->Unpack();
  recording_->EndRead(begin, object_, tensor, *saved_, part_);
  return tensor;
}

RecordedTensor::~RecordedTensor() {
  recording_->ForgetHandle(object_, *saved_);
  std::optional<DeviceRecording::Moment> begin;
  RunLoggingErrors(kNoRelease, [&] {
    if (!recording_->IsRecording()) return;
    DeviceRecording::Moment now = recording_->Begin();
    // The recording's weak references make tensors aliased that otherwise would not be.
    SettleLoans();
    begin = std::move(now);
  });
  saved_.reset();
  if (!begin.has_value()) return;
  RunLoggingErrors(kNoRelease, [&] { recording_->EndRelease(*begin, object_); });
}

void RunBeside(absl::Span<const std::shared_ptr<DeviceRecording>> recordings,
               absl::FunctionRef<void()> work) {
  std::vector<std::pair<DeviceRecording*, DeviceRecording::Moment>> begun;
  // Must not throw, since destructors of scopes call this.
  RunLoggingErrors(kNotAside, [&] {
    for (const auto& recording : recordings) {
      if (recording->IsRecording()) begun.emplace_back(recording.get(), recording->Begin());
    }
  });
  work();
  RunLoggingErrors(kNotAside, [&] {
    for (const auto& [recording, begin] : begun) recording->EndAside(begin);
  });
}

}  // namespace pinion
