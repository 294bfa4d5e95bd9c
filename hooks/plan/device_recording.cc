#include "pinion/hooks/plan/device_recording.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/hooks/plan/saved_signature.h"

namespace pinion {
namespace {

constexpr absl::Duration kFinishTimeout = absl::Minutes(1);

}  // namespace

absl::Status DeviceRecording::CheckNotCapturing() const {
  PINION_ASSIGN_OR_RETURN(const bool capturing,
                          clock_->IsCapturing(NativeStream(CurrentStream(device_))));
  if (!capturing) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the current stream of ", device_.str(),
                   " captures a graph: finish the record of the step once that has ended"));
}

void DeviceRecording::Abandon() {
  std::vector<NotedEntry> entries;  // their events go after the lock
  MutexLock lock(mu_);
  finished_ = true;
  entries.swap(entries_);
}

void DeviceRecording::Start() {
  // An event that a graph has captured tells no time.
  if (!IsRecording()) return;
  const StreamClock::Moment now = clock_->Now(NativeStream(CurrentStream(device_)));
  MutexLock lock(mu_);
  if (entries_.empty()) entries_.push_back({.begin = now, .end = now});
}

bool DeviceRecording::IsRecording() {
  bool has_no_end = false;
  {
    MutexLock lock(mu_);
    if (finished_) return false;
    has_no_end = entries_.size() >= kMaxEntries;
  }
  if (has_no_end) {
    Abandon();
    return false;
  }
  const absl::StatusOr<bool> capturing = clock_->IsCapturing(NativeStream(CurrentStream(device_)));
  return capturing.ok() && !*capturing;
}

// To count bytes takes the host's time, which is none of the step's: it lies within begin and end.
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

DeviceRecording::Moment DeviceRecording::CountBytes() {
  const int64_t allocated_bytes = AllocatedBytes(device_) - visiting_bytes();
  MutexLock lock(mu_);
  const DevicePeaks::Since since = peaks_.Take(allocated_bytes);
  const KnownStorages::Bytes bytes = storages_.CountAt(allocated_bytes);
  NoteLetGo(since);
  return {.time = {}, .bytes = bytes, .peak_bytes = since.peak_bytes};
}

void DeviceRecording::NoteLetGo(const DevicePeaks::Since& since) {
  std::vector<NotedObject*> gone;
  std::erase_if(objects_.held, [&](ObjectId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    NotedObject& object = objects_.all[id];
    if (IsHeld(object)) return false;
    peaks_.Drop(object.data);
    object.let_go = uses_;
    if (object.handles > 0 && storages_.IsGone(object.storage)) gone.push_back(&object);
    return true;
  });
  std::erase_if(objects_.held_inputs, [&](size_t input) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    objects_.inputs[input].let_go = uses_;
    return storages_.IsGone(objects_.inputs[input].storage);
  });
  NoteGone(since, gone, entries_.size());
}

bool DeviceRecording::IsHeld(NotedObject& object) {
  const size_t owners = storages_.Owners(object.storage);
  if (owners == 0) return false;
  const std::vector<ObjectId>& in_it = storages_.objects(object.storage);
  size_t saved = 0;
  for (const ObjectId id : in_it) saved += objects_.all[id].saved.size();
  if (owners > saved) return true;  // without asking each of them
  absl::flat_hash_set<const void*> packers;
  for (const ObjectId id : in_it) {
    std::erase_if(objects_.all[id].saved, [&packers](const SavedTensor* saved) {
      const void* owner = saved->MemoryOwner();
      if (owner != nullptr) packers.insert(owner);
      return owner == nullptr;
    });
  }
  return owners > packers.size();
}

DeviceRecording::ObjectId DeviceRecording::EndSave(const Moment& begin, const at::Tensor& tensor,
                                                   uint64_t place, bool is_leaf,
                                                   const SavedTensor& saved,
                                                   const std::optional<SegmentPart>& part) {
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return 0;  // nobody asks what it was
  const ObjectId id = FindOrAdd(tensor, place, is_leaf);
  NotedObject& object = objects_.all[id];
  storages_.NoteAllocations(begin.bytes, end.bytes);
  const int64_t other_bytes = storages_.OtherBytes(end.bytes);
  if (++object.handles == 1) {
    storages_.Hold(object.storage, Allocated(object.extent));
    objects_.held.push_back(id);
    peaks_.Hold(object.data);
  }
  object.is_computed_again =
      saved.IsComputedAgain() && (object.handles == 1 || object.is_computed_again);
  object.last_save = uses_;
  Append(begin, end, {.used = id, .by = place / 2, .part = part});
  // What was one of the other bytes until here is an object's in all of the stretch, which began
  // behind the last use.
  const int64_t object_bytes = other_bytes - entries_.back().other_bytes;
  auto entry = entries_.rbegin();
  entry->peak_other_bytes -= object_bytes;
  while (++entry != entries_.rend() && !entry->used.has_value()) {
    entry->peak_other_bytes -= object_bytes;
    entry->other_bytes -= object_bytes;
  }
  objects_.all[id].saved.push_back(&saved);  // last: what throws has registered nothing
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

void DeviceRecording::EndRead(const Moment& begin, ObjectId object, const at::Tensor& tensor,
                              const SavedTensor& saved, const std::optional<SegmentPart>& part) {
  const Moment end = End();
  const int64_t backward = CurrentBackward();
  bool is_first = false;
  {
    MutexLock lock(mu_);
    if (finished_) return;
    storages_.NoteAllocations(begin.bytes, end.bytes);
    storages_.NoteRead(tensor.storage());
    Append(begin, end,
           {.used = object,
            .computed_again = saved.WasComputedAgain(),
            .by = ~CurrentBackwardNode(),
            .part = part});
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
  if (finished_) return;
  storages_.NoteAllocations(begin.bytes, end.bytes);
  Append(begin, end, {});
}

void DeviceRecording::NoteSegment(const SegmentBegin& segment, uint32_t ordinal,
                                  uint64_t min_bytes) {
  if (!IsRecording()) return;
  const Moment begin = Begin();
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return;
  storages_.NoteAllocations(begin.bytes, end.bytes);
  for (const at::Tensor& input : segment.inputs) {
    if (!input.defined() || input.device() != device_ || !input.has_storage()) continue;
    const c10::Storage& storage = input.storage();
    const StorageExtent extent = ExtentToSave(ExtentOf(input), storage.nbytes());
    if (extent.size_bytes() == 0 || extent.size_bytes() < min_bytes) continue;
    objects_.held_inputs.push_back(objects_.inputs.size());
    objects_.inputs.push_back({.segment = ordinal,
                               .storage = storages_.FindOrAdd(storage),
                               .version = SavedVersion(input),
                               .extent = extent,
                               .is_leaf = input.is_leaf(),
                               .begin = uses_});
  }
  Append(begin, end, {.begins = ordinal, .part = CurrentPart(device_)});
}

void DeviceRecording::ForgetSaved(ObjectId id, const SavedTensor& saved) {
  MutexLock lock(mu_);
  if (id < objects_.all.size()) std::erase(objects_.all[id].saved, &saved);
}

void DeviceRecording::EndRelease(const Moment& begin, ObjectId id) {
  const Moment end = End();
  MutexLock lock(mu_);
  if (finished_) return;
  storages_.NoteAllocations(begin.bytes, end.bytes);
  NotedObject& object = objects_.all[id];
  NotedEntry what;
  if (--object.handles == 0) {
    object.uses_at_release = uses_;
    storages_.Release(object.storage, Allocated(object.extent));
    what.released = id;
  }
  Append(begin, end, std::move(what));
}

void DeviceRecording::Append(const Moment& begin, const Moment& end, NotedEntry what) {
  what.begin = begin.time;
  what.end = end.time;
  what.peak_other_bytes = begin.peak_bytes;
  what.object_bytes = end.bytes.allocated - storages_.OtherBytes(end.bytes);
  // Objects that have gone since then count in all of the stretch, so they are no other bytes.
  if (!entries_.empty()) what.peak_other_bytes -= entries_.back().object_bytes;
  what.other_bytes = storages_.OtherBytes(end.bytes);
  if (what.used.has_value()) ++uses_;
  if (entries_.empty()) entries_.push_back({.begin = begin.time, .end = begin.time});
  entries_.push_back(std::move(what));
}

DeviceRecording::ObjectId DeviceRecording::FindOrAdd(const at::Tensor& tensor, uint64_t place,
                                                     bool is_leaf) {
  const c10::Storage& storage = tensor.storage();
  const StorageExtent extent = ExtentOf(tensor);
  const SavedVersion version(tensor);
  const KnownStorages::Id known = storages_.FindOrAdd(storage);
  for (const ObjectId id : storages_.objects(known)) {
    const NotedObject& object = objects_.all[id];
    // What was released in between is saved anew by whoever packs.
    if (object.handles > 0 && object.version == version && object.extent.Contains(extent)) {
      return id;
    }
  }
  const auto id = static_cast<ObjectId>(objects_.all.size());
  const StorageExtent to_save = ExtentToSave(extent, storage.nbytes());
  NotedObject object = {.planned = {},
                        .storage = known,
                        .data = storage.data(),
                        .version = version,
                        .extent = to_save,
                        .is_leaf = is_leaf,
                        .first_use = uses_};
  object.planned.size_bytes = AllocationBytes(to_save.size_bytes());
  object.planned.signature = SignatureOf(tensor, place, to_save.size_bytes());
  objects_.all.push_back(std::move(object));
  storages_.objects(known).push_back(id);
  return id;
}

void DeviceRecording::DecideReleased() {
  for (NotedObject& object : objects_.all) {
    if (object.is_decided || object.handles > 0) continue;
    object.is_decided = true;
    object.planned.frees = storages_.IsGone(object.storage);
  }
}

absl::StatusOr<StepRecord> DeviceRecording::Finish() {
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
    for (const NotedEntry& entry : entries_) {
      moments.push_back(entry.begin);
      moments.push_back(entry.end);
    }
    DecideReleased();
    for (const ObjectId id : objects_.held) objects_.all[id].let_go = uses_;
    // A graph that is left holds its own: what is no leaf is taken for its alone.
    for (NotedObject& object : objects_.all) {
      if (object.is_decided) continue;
      object.planned.frees = storages_.IsGone(object.storage) || !object.is_leaf;
    }
  }
  PINION_ASSIGN_OR_RETURN(const StreamClock::Times times, clock_->Read(moments, kFinishTimeout));
  MutexLock lock(mu_);
  return StepOf(entries_, objects_.all, objects_.inputs, times);
}

}  // namespace pinion
