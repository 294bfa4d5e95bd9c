#include "pinion/hooks/plan/device_recording.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

constexpr absl::Duration kFinishTimeout = absl::Minutes(1);

int64_t AllocatedBytes(c10::Device device) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[kAll]
      .current;
}

// FNV-1a: the same in every process, unlike absl::Hash.
uint64_t Signature(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  add(place);
  add(size_bytes);
  add(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
  return hash;
}

}  // namespace

absl::Status DeviceRecording::CheckNotCapturing() const {
  PINION_ASSIGN_OR_RETURN(const bool capturing,
                          clock_->IsCapturing(NativeStream(CurrentStream(device_))));
  if (!capturing) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the current stream of ", device_.str(),
                   " captures a graph: finish the record of the step once that has ended"));
}

void DeviceRecording::Start() {
  // An event that a graph has captured tells no time.
  if (!IsRecording()) return;
  const StreamClock::Moment now = clock_->Now(NativeStream(CurrentStream(device_)));
  MutexLock lock(mu_);
  if (entries_.empty()) entries_.push_back({now, now, std::nullopt, 0});
}

bool DeviceRecording::IsRecording() const {
  {
    MutexLock lock(mu_);
    if (finished_) return false;
  }
  const absl::StatusOr<bool> capturing = clock_->IsCapturing(NativeStream(CurrentStream(device_)));
  return capturing.ok() && !*capturing;
}

// To count bytes takes the host's time, which is none of the step's: it lies within begin and end.
DeviceRecording::Moment DeviceRecording::Begin() const {
  StreamClock::Moment time = clock_->Now(NativeStream(CurrentStream(device_)));
  Moment moment = CountBytes();
  moment.time = std::move(time);
  return moment;
}

DeviceRecording::Moment DeviceRecording::End() const {
  Moment moment = CountBytes();
  moment.time = clock_->Now(NativeStream(CurrentStream(device_)));
  return moment;
}

DeviceRecording::Moment DeviceRecording::CountBytes() const {
  Moment moment;
  moment.allocated_bytes = AllocatedBytes(device_);
  MutexLock lock(mu_);
  moment.known_bytes = KnownBytes();
  return moment;
}

DeviceRecording::ObjectId DeviceRecording::EndSave(const Moment& begin, const at::Tensor& tensor,
                                                   uint64_t place, bool is_leaf) {
  const Moment end = End();
  MutexLock lock(mu_);
  const ObjectId id = FindOrAdd(tensor, place, is_leaf);
  Object& object = objects_[id];
  NoteAllocations(begin, end);
  if (++object.handles == 1) {
    KnownOf(tensor.storage()).object_bytes += object.planned.size_bytes;
  }
  Append(begin, end, id);
  return id;
}

DeviceRecording::Moment DeviceRecording::BeginRead() {
  const int64_t backward = CurrentBackward();
  bool is_first = false;
  if (backward != -1) {
    MutexLock lock(mu_);
    is_first = endings_.try_emplace(backward).second;
  }
  // Before whoever packs can have asked for the same: callbacks run in their order.
  if (is_first) {
    AtEndOfBackward([self = shared_from_this(), backward] { self->BeginEnding(backward); });
  }
  return Begin();
}

void DeviceRecording::EndRead(const Moment& begin, ObjectId object, const at::Tensor& tensor) {
  const Moment end = End();
  const int64_t backward = CurrentBackward();
  bool is_first = false;
  {
    MutexLock lock(mu_);
    NoteAllocations(begin, end);
    if (!known_.contains(tensor.storage().unsafeGetStorageImpl())) {
      // It was fetched, just now or ahead.
      ahead_bytes_ -= static_cast<int64_t>(tensor.storage().nbytes());
      KnownOf(tensor.storage()).object_bytes = tensor.storage().nbytes();
    }
    Append(begin, end, object);
    const auto ending = endings_.find(backward);
    is_first = ending != endings_.end() && !std::exchange(ending->second.has_end, true);
  }
  if (is_first) {
    AtEndOfBackward([self = shared_from_this(), backward] { self->EndEnding(backward); });
  }
}

void DeviceRecording::BeginEnding(int64_t backward) {
  try {
    if (!IsRecording()) return;
    const Moment begin = Begin();
    MutexLock lock(mu_);
    endings_[backward].begin = begin;
  } catch (const std::exception& error) {
    PINION_LOG(kWarning) << "the end of a backward was not recorded: " << error.what();
  }
}

void DeviceRecording::EndEnding(int64_t backward) {
  Ending ending;
  {
    MutexLock lock(mu_);
    const auto found = endings_.find(backward);
    if (found == endings_.end()) return;
    ending = std::move(found->second);
    endings_.erase(found);
    DecideReleased();
  }
  try {
    if (ending.begin.has_value() && IsRecording()) EndAside(*ending.begin);
  } catch (const std::exception& error) {
    PINION_LOG(kWarning) << "the end of a backward was not recorded: " << error.what();
  }
}

void DeviceRecording::EndAside(const Moment& begin) {
  const Moment end = End();
  MutexLock lock(mu_);
  NoteAllocations(begin, end);
  Append(begin, end, std::nullopt);
}

void DeviceRecording::EndRelease(const Moment& begin, ObjectId id) {
  const Moment end = End();
  MutexLock lock(mu_);
  NoteAllocations(begin, end);
  Append(begin, end, std::nullopt);
  Object& object = objects_[id];
  if (--object.handles > 0) return;
  object.uses_at_release = uses_;
  known_.at(object.storage._unsafe_get_target()).object_bytes -= object.planned.size_bytes;
}

void DeviceRecording::Append(const Moment& begin, const Moment& end, std::optional<ObjectId> used) {
  Entry entry = {begin.time, end.time, used, 0};
  if (used.has_value()) {
    entry.other_bytes = OtherBytes(end);
    ++uses_;
  }
  if (entries_.empty()) entries_.push_back({begin.time, begin.time, std::nullopt, 0});
  entries_.push_back(std::move(entry));
}

DeviceRecording::ObjectId DeviceRecording::FindOrAdd(const at::Tensor& tensor, uint64_t place,
                                                     bool is_leaf) {
  const c10::Storage& storage = tensor.storage();
  const StorageExtent extent = ExtentOf(tensor);
  const SavedVersion version(tensor);
  Known& known = KnownOf(storage);
  for (const ObjectId id : known.objects) {
    const Object& object = objects_[id];
    if (object.version == version && object.extent.begin_bytes <= extent.begin_bytes &&
        extent.end_bytes <= object.extent.end_bytes) {
      return id;
    }
  }
  const auto id = static_cast<ObjectId>(objects_.size());
  Object object = {.planned = {},
                   .storage = storage.getWeakStorageImpl(),
                   .version = version,
                   .extent = ExtentToSave(extent, storage.nbytes()),
                   .is_leaf = is_leaf,
                   .first_use = uses_};
  object.planned.size_bytes = object.extent.size_bytes();
  object.planned.signature = Signature(tensor, place, object.planned.size_bytes);
  objects_.push_back(std::move(object));
  known.objects.push_back(id);
  return id;
}

DeviceRecording::Known& DeviceRecording::KnownOf(const c10::Storage& storage) {
  return known_
      .try_emplace(storage.unsafeGetStorageImpl(),
                   Known{.storage = storage.getWeakStorageImpl(), .size_bytes = storage.nbytes()})
      .first->second;
}

int64_t DeviceRecording::KnownBytes() const {
  uint64_t bytes = 0;
  for (const auto& [storage, known] : known_) {
    if (!known.storage.expired()) bytes += known.size_bytes;
  }
  return static_cast<int64_t>(bytes);
}

void DeviceRecording::NoteAllocations(const Moment& begin, const Moment& end) {
  ahead_bytes_ +=
      end.allocated_bytes - begin.allocated_bytes - (end.known_bytes - begin.known_bytes);
}

int64_t DeviceRecording::OtherBytes(const Moment& end) const {
  uint64_t object_bytes = 0;
  for (const auto& [storage, known] : known_) {
    // Objects of one storage can overlap.
    if (!known.storage.expired()) object_bytes += std::min(known.size_bytes, known.object_bytes);
  }
  return end.allocated_bytes - static_cast<int64_t>(object_bytes) - ahead_bytes_;
}

void DeviceRecording::DecideReleased() {
  for (Object& object : objects_) {
    if (object.is_decided || object.handles > 0) continue;
    object.is_decided = true;
    object.planned.frees = object.storage.expired();
  }
}

absl::StatusOr<StepRecord> DeviceRecording::Finish() {
  const Moment end = Begin();
  std::vector<StreamClock::Moment> moments;
  {
    MutexLock lock(mu_);
    finished_ = true;
    Append(end, end, std::nullopt);
    entries_.back().other_bytes = OtherBytes(end);
    for (const Entry& entry : entries_) {
      moments.push_back(entry.begin);
      moments.push_back(entry.end);
    }
    DecideReleased();
    // A graph that is left holds its own: what is no leaf is taken for its alone.
    for (Object& object : objects_) {
      if (!object.is_decided) object.planned.frees = object.storage.expired() || !object.is_leaf;
    }
  }
  PINION_ASSIGN_OR_RETURN(const StreamClock::Times times, clock_->Read(moments, kFinishTimeout));
  MutexLock lock(mu_);
  return Build(times);
}

StepRecord DeviceRecording::Build(const StreamClock::Times& times) const {
  StepRecord step;
  step.timed_by_host = times.by_host;
  double compute_us = 0;
  for (size_t i = 1; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    // Streams of one device may overtake each other.
    compute_us += std::max(0.0, times.us[2 * i] - times.us[2 * i - 1]);
    if (!entry.used.has_value() && i + 1 < entries_.size()) continue;
    if (entry.used.has_value()) step.uses.push_back(*entry.used);
    StepStretch stretch;
    stretch.compute_us = std::exchange(compute_us, 0);
    stretch.other_bytes = static_cast<uint64_t>(std::max<int64_t>(0, entry.other_bytes));
    step.stretches.push_back(stretch);
  }
  for (const Object& object : objects_) {
    step.objects.push_back(object.planned);
    if (object.planned.frees) continue;
    const size_t end = object.handles > 0 ? step.stretches.size() : object.uses_at_release;
    for (size_t i = object.first_use; i < end; ++i) {
      step.stretches[i].other_bytes += object.planned.size_bytes;
    }
  }
  return step;
}

}  // namespace pinion
