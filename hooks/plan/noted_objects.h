// The objects of a step that is being recorded and the inputs of its segments: what they are, which
// storages they lie in, and until when the program holds them.
//
//   NotedObjects::Id id = objects.FindOrAdd(tensor, place, is_leaf, uses);
//   objects.Hold(id, peaks);                      // by one handle more
//   ... at each moment, behind KnownStorages::CountAt ...
//   objects.NoteLetGo(since, uses, entry, peaks);
//
// Thread safety: none. Nothing here frees memory or calls the device.
// Ownership: a saved tensor is its maker's, and known until ForgetSaved.

#ifndef PINION_HOOKS_PLAN_NOTED_OBJECTS_H_
#define PINION_HOOKS_PLAN_NOTED_OBJECTS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/device_peaks.h"
#include "pinion/hooks/plan/known_storages.h"
#include "pinion/hooks/plan/noted_step.h"

namespace pinion {

class NotedObjects {
 public:
  using Id = uint32_t;

  // The object that the tensor is part of. `place` goes into its signature. `uses`, here and below:
  // of all objects so far.
  Id FindOrAdd(const at::Tensor& tensor, uint64_t place, bool is_leaf, size_t uses);
  NotedObject& operator[](Id id) { return all_[id]; }
  // One more handle, and one less, which may be the last.
  void Hold(Id id, DevicePeaks& peaks);
  bool Release(Id id, size_t uses);
  // `tensor` was read of the object. What the reader keeps is among the other bytes from now on.
  void NoteRead(Id id, const at::Tensor& tensor, bool reader_keeps, DevicePeaks& peaks);
  // `saved`, which was made of the object, is about to go.
  void ForgetSaved(Id id, const SavedTensor& saved);
  void AddInput(const at::Tensor& input, uint32_t segment, uint64_t min_bytes, size_t uses);

  // Of what the program still held, which it has let go of by now, `since` the last moment: `entry`
  // is the next one. `peaks` holds what the program does.
  void NoteLetGo(const DevicePeaks::Since& since, size_t uses, size_t entry, DevicePeaks& peaks);
  // The peak since the last moment if fetched copies had stayed as long as they are needed. A
  // tensor that a plan does not move stays as long.
  int64_t PeakHadCopiesStayed(const DevicePeaks::Since& since);
  // Of objects without handles, whether they have freed their memory: at the end of a backward all
  // who copied it out or lent it have let go of it.
  void DecideReleased();
  // The step has ended, after so many uses.
  void End(size_t uses);

  KnownStorages& storages() { return storages_; }
  const std::vector<NotedObject>& all() const { return all_; }
  const std::vector<NotedInput>& inputs() const { return inputs_; }

 private:
  // Somebody holds the device memory of the object beside those who have packed it.
  bool IsHeld(const NotedObject& object);
  // Whoever has read it keeps it.
  void LeaveToReader(Id id);
  // A part of a storage that stays keeps all of it. What nobody else saves of the storage counts
  // for the object that is needed longest.
  void CountRest(KnownStorages::Id storage);

  KnownStorages storages_;
  std::vector<NotedObject> all_;
  std::vector<Id> held_;                         // by the program, when they were last looked at
  absl::flat_hash_map<const void*, Id> copies_;  // that were fetched and read, by where they are
  std::vector<NotedInput> inputs_;
  std::vector<size_t> held_inputs_;  // whose memory was there when it was last looked for
};

}  // namespace pinion

#endif  // PINION_HOOKS_PLAN_NOTED_OBJECTS_H_
