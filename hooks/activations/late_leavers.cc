#include "pinion/hooks/activations/late_leavers.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pinion {

void TakeLateLeavers(OffloadState& state, OffloadStatsRecorder& stats, const NodeId& node,
                     RecordPtrs& due, Released& released) {
  const std::vector<uint32_t> objects = state.schedule->TakeLateLeavers();
  if (objects.empty()) return;
  for (const RecordPtr& record : state.books.storages.Find(objects)) {
    if (!record->Stays()) continue;
    if (record->cast != nullptr && record->cast->IsUnchanged()) {
      released.plain.push_back(record->LeaveToBeCastAgain());
      stats.Update([](OffloadStats& counts) {
        --counts.kept_as_planned;
        ++counts.cast_again;
      });
      continue;
    }
    const bool have_returned =
        !state.books.pending.IsAnyOpen() ||
        std::all_of(record->leaving.nodes.begin(), record->leaving.nodes.end(),
                    [&](const NodeId& saver) { return HasReturned(saver, node); });
    const bool is_open = !have_returned && state.books.pending.IsOpen(record->scope);
    // Nobody would send it on its way once the operator of a later scope has returned: it stays.
    if (!have_returned && !is_open) continue;
    stats.Update([&record](OffloadStats& counts) {
      --counts.kept_as_planned;
      ++counts.offloaded;
      counts.offloaded_bytes += record->size_bytes();
    });
    if (is_open) {
      const NodeId saver = record->leaving.nodes.back();
      record->leaving.nodes.pop_back();
      state.books.pending.Add(record, saver);
    } else {
      record->leaving.copy_out = StorageRecord::CopyOut::kDecided;
      due.push_back(record);
    }
  }
}

}  // namespace pinion
