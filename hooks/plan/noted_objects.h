// The objects of a step during its recording, and the inputs of its segments: their properties,
// their storages, and how long the program references them.
//
//   NotedObjects::Id id = objects.Add(tensor, place, is_leaf, uses);
//   objects.Hold(id, peaks);                      // adds a handle
//   ... at each moment, after KnownStorages::CountAt ...
//   objects.NoteLetGo(since, uses, entry, peaks);
//
// Thread safety: not thread-safe. Frees no memory and does not call the device.
// Ownership: does not own saved tensors, which must live until ForgetHandle.

#ifndef PINION_HOOKS_PLAN_NOTED_OBJECTS_H_
#define PINION_HOOKS_PLAN_NOTED_OBJECTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/device_peaks.h"
#include "pinion/hooks/plan/known_storages.h"
#include "pinion/hooks/plan/noted_step.h"

namespace pinion {

// Returns a number for a place in the graph. Repeated steps get the same numbers if `begin` is
// CurrentNode() at the step's or a scope's beginning. Returns 0 or 1 for other threads, which count
// their own nodes.
uint64_t PlaceNumber(const NodeId& begin, const GraphPlace& place);

// Returns StepObject::signature for a tensor at PlaceNumber `place` with `size_bytes` to save.
uint64_t SignatureOf(const at::Tensor& tensor, uint64_t place, uint64_t size_bytes);

class NotedObjects {
 public:
  using Id = uint32_t;

  // Returns the object that contains the tensor, by storage, version and extent; nothing if none
  // does.
  std::optional<Id> Find(const at::Tensor& tensor);
  // Returns whether the object has handles and contains the tensor, which has its storage and
  // version. Packers save the bytes anew after the last handle was released.
  bool Contains(Id id, const at::Tensor& tensor) const;
  // Adds an object. `place` is hashed into its signature. `uses`, here and below, is the number of
  // accesses so far.
  Id Add(const at::Tensor& tensor, uint64_t place, bool is_leaf, size_t uses);
  NotedObject& operator[](Id id) { return all_[id]; }
  // Adds a handle. Release removes one and returns whether it was the last.
  void Hold(Id id, DevicePeaks& peaks);
  bool Release(Id id, size_t uses);
  // Reports a read. A copy that the reader keeps counts as other bytes from now on.
  void NoteRead(Id id, const at::Tensor& tensor, bool reader_keeps, DevicePeaks& peaks);
  // Must be called before `handle`, which stands for the object, is destroyed.
  void ForgetHandle(Id id, const SavedTensor& handle);
  void AddInput(const at::Tensor& input, uint32_t segment, uint64_t min_bytes, size_t uses);

  // Detects objects that the program has released since the last moment (`since`). `entry` is the
  // next entry's index. `peaks` holds the memory that the program references.
  void NoteLetGo(const DevicePeaks::Since& since, size_t uses, size_t entry, DevicePeaks& peaks);
  // Returns the peak since the last moment, as if fetched copies had stayed while needed, like
  // tensors that a plan does not move.
  int64_t PeakHadCopiesStayed(const DevicePeaks::Since& since);
  // Determines for objects without handles whether they have freed their memory. For the end of a
  // backward, when packers have released their references.
  void DecideReleased();
  // Ends the step.
  void End(size_t uses);

  KnownStorages& storages() { return storages_; }
  const std::vector<NotedObject>& all() const { return all_; }
  const std::vector<NotedInput>& inputs() const { return inputs_; }

 private:
  // Returns whether the program or another owner references the object's memory, beside packers.
  bool IsHeld(const NotedObject& object);
  // Counts the object's memory as its reader's.
  void LeaveToReader(Id id);
  // A resident part of a storage keeps the whole storage. Adds the bytes of the storage that are in
  // no object to the object that is needed longest.
  void CountRest(KnownStorages::Id storage);

  KnownStorages storages_;
  std::vector<NotedObject> all_;
  std::vector<Id> held_;                         // referenced by the program at the last look
  absl::flat_hash_map<const void*, Id> copies_;  // fetched and read, by address
  std::vector<NotedInput> inputs_;
  std::vector<size_t> held_inputs_;  // with living memory at the last look
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_NOTED_OBJECTS_H_
