#include "pinion/hooks/plan/noted_objects.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

std::optional<NotedObjects::Id> NotedObjects::Find(const at::Tensor& tensor) {
  const SavedVersion version(tensor);
  for (const Id id : storages_.objects(storages_.FindOrAdd(tensor.storage()))) {
    if (all_[id].version == version && Contains(id, tensor)) return id;
  }
  return std::nullopt;
}

bool NotedObjects::Contains(Id id, const at::Tensor& tensor) const {
  return all_[id].handles > 0 && all_[id].extent.Contains(ExtentOf(tensor));
}

NotedObjects::Id NotedObjects::Add(const at::Tensor& tensor, uint64_t place, bool is_leaf,
                                   size_t uses) {
  const c10::Storage& storage = tensor.storage();
  const KnownStorages::Id known = storages_.FindOrAdd(storage);
  const auto id = static_cast<Id>(all_.size());
  const StorageExtent to_save = ExtentToSave(ExtentOf(tensor), storage.nbytes());
  NotedObject object = {.planned = {},
                        .storage = known,
                        .data = storage.data(),
                        .version = SavedVersion(tensor),
                        .extent = to_save,
                        .storage_bytes = AllocationBytes(storage.nbytes()),
                        .is_leaf = is_leaf,
                        .first_use = uses};
  object.planned.size_bytes = AllocationBytes(to_save.size_bytes());
  object.planned.signature = SignatureOf(tensor, place, to_save.size_bytes());
  all_.push_back(std::move(object));
  storages_.objects(known).push_back(id);
  return id;
}

void NotedObjects::Hold(Id id, DevicePeaks& peaks) {
  NotedObject& object = all_[id];
  if (++object.handles > 1) return;
  storages_.Hold(object.storage);
  held_.push_back(id);
  peaks.Hold(object.data);
}

bool NotedObjects::Release(Id id, size_t uses) {
  NotedObject& object = all_[id];
  if (--object.handles > 0) return false;
  object.uses_at_release = uses;
  if (!std::exchange(object.is_readers, false)) {
    storages_.Release(object.storage);
  }
  return true;
}

void NotedObjects::LeaveToReader(Id id) {
  NotedObject& object = all_[id];
  if (object.handles == 0 || std::exchange(object.is_readers, true)) return;
  storages_.Release(object.storage);
}

void NotedObjects::NoteRead(Id id, const at::Tensor& tensor, bool reader_keeps,
                            DevicePeaks& peaks) {
  if (reader_keeps) LeaveToReader(id);
  const c10::Storage& storage = tensor.storage();
  if (!storages_.NoteRead(storage, reader_keeps) || reader_keeps) return;
  copies_[storage.data()] = id;
  peaks.Hold(storage.data());
}

int64_t NotedObjects::PeakHadCopiesStayed(const DevicePeaks::Since& since) {
  int64_t stayed_bytes = 0;
  int64_t peak_bytes = since.peak_bytes;
  for (const DevicePeaks::Freed& freed : since.freed) {
    const auto copy = copies_.extract(freed.data);
    if (!copy.empty() && all_[copy.mapped()].handles > 0) {
      stayed_bytes += static_cast<int64_t>(all_[copy.mapped()].planned.size_bytes);
    }
    peak_bytes = std::max(peak_bytes, freed.later_peak_bytes + stayed_bytes);
  }
  return peak_bytes;
}

void NotedObjects::ForgetHandle(Id id, const SavedTensor& handle) {
  if (id < all_.size()) std::erase(all_[id].saved, &handle);
}

void NotedObjects::AddInput(const at::Tensor& input, uint32_t segment, uint64_t min_bytes,
                            size_t uses) {
  const c10::Storage& storage = input.storage();
  const StorageExtent extent = ExtentToSave(ExtentOf(input), storage.nbytes());
  if (extent.size_bytes() == 0 || extent.size_bytes() < min_bytes) return;
  held_inputs_.push_back(inputs_.size());
  inputs_.push_back({.segment = segment,
                     .storage = storages_.FindOrAdd(storage),
                     .version = SavedVersion(input),
                     .extent = extent,
                     .is_leaf = input.is_leaf(),
                     .begin = uses});
}

void NotedObjects::NoteLetGo(const DevicePeaks::Since& since, size_t uses, size_t entry,
                             DevicePeaks& peaks) {
  std::vector<NotedObject*> gone;
  std::erase_if(held_, [&](Id id) {
    NotedObject& object = all_[id];
    if (IsHeld(object)) return false;
    peaks.Drop(object.data);
    object.let_go = uses;
    if (object.handles > 0 && storages_.IsGone(object.storage)) gone.push_back(&object);
    return true;
  });
  std::erase_if(held_inputs_, [&](size_t input) {
    inputs_[input].let_go = uses;
    return storages_.IsGone(inputs_[input].storage);
  });
  if (!gone.empty()) NoteGone(since, gone, entry);
}

bool NotedObjects::IsHeld(const NotedObject& object) {
  const size_t owners = storages_.Owners(object.storage);
  if (owners == 0) return false;
  const KnownStorages::Objects& in_it = storages_.objects(object.storage);
  size_t saved = 0;
  for (const Id id : in_it) saved += all_[id].saved.size();
  if (owners > saved) return true;  // avoids asking each saved tensor
  absl::InlinedVector<const void*, 4> packers;
  for (const Id id : in_it) {
    std::erase_if(all_[id].saved, [&packers](const SavedTensor* saved) {
      const void* owner = saved->MemoryOwner();
      if (owner != nullptr) packers.push_back(owner);
      return owner == nullptr;
    });
  }
  std::sort(packers.begin(), packers.end(), std::less<>());
  const auto end = std::unique(packers.begin(), packers.end());
  return owners > static_cast<size_t>(end - packers.begin());
}

void NotedObjects::DecideReleased() {
  for (NotedObject& object : all_) {
    if (object.is_decided || object.handles > 0) continue;
    object.is_decided = true;
    object.planned.frees = storages_.IsGone(object.storage);
  }
}

void NotedObjects::CountRest(KnownStorages::Id storage) {
  NotedObject* longest = nullptr;
  uint64_t others_bytes = 0;
  for (const Id id : storages_.objects(storage)) {
    NotedObject& object = all_[id];
    if (longest == nullptr || object.IsNeededLongerThan(*longest)) {
      longest = &object;
      others_bytes = 0;
    } else if (!longest->IsNeededLongerThan(object)) {
      others_bytes += object.planned.size_bytes;
    }
  }
  if (longest == nullptr) return;
  const uint64_t rest_bytes =
      longest->storage_bytes - std::min(longest->storage_bytes, others_bytes);
  longest->planned.size_bytes = std::max(longest->planned.size_bytes, rest_bytes);
}

void NotedObjects::End(size_t uses) {
  DecideReleased();
  for (const Id id : held_) all_[id].let_go = uses;
  for (KnownStorages::Id storage = 0; storage < storages_.size(); ++storage) CountRest(storage);
  // A remaining graph owns its objects. Assume that it is the only owner of those that are no
  // leaves.
  for (NotedObject& object : all_) {
    if (object.is_decided) continue;
    object.planned.frees = storages_.IsGone(object.storage) || !object.is_leaf;
  }
}

uint64_t PlaceNumber(const NodeId& begin, const GraphPlace& place) {
  return 2 * NodesSince(begin, place.node).value_or(0) + (place.is_output ? 1 : 0);
}

// FNV-1a, which is the same in every process, unlike absl::Hash.
uint64_t SignatureOf(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  add(place);
  add(size_bytes);
  add(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
  return hash;
}

}  // namespace pinion
