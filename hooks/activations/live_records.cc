#include "pinion/hooks/activations/live_records.h"

#include <cstddef>

#include "pinion/hooks/activations/scope_packer.h"
#include "pinion/hooks/activations/storage_record.h"

namespace pinion {

void AppendLiveOf(OffloadState& state, c10::Device device, std::vector<LiveTensor>& tensors) {
  RecordPtrs records;
  const size_t first = tensors.size();
  {
    OffloadLock lock(state);
    records = state.books.storages.All();
    for (const RecordPtr& record : records) {
      LiveTensor& tensor = tensors.emplace_back();
      tensor.saved_tensors = record->live_handles;
      tensor.on_device = record->IsOnDevice();
      tensor.in_host_memory = record->in_parcel.parcel() != nullptr;
    }
  }
  for (size_t i = 0; i < records.size(); ++i) {
    const StorageRecord& record = *records[i];
    LiveTensor& tensor = tensors[first + i];
    tensor.tensor = record.origin.view().Describe();
    tensor.made_by = record.origin.MadeBy();
    tensor.node = record.origin.node();
    tensor.scope = record.scope;
    tensor.scopes_ago = LastScopeId() - record.scope;
    tensor.device_index = device.index();
    tensor.size_bytes = record.size_bytes();
  }
}

}  // namespace pinion
