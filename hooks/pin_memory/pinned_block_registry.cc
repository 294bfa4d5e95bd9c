#include "pinion/hooks/pin_memory/pinned_block_registry.h"

#include <algorithm>
#include <utility>

namespace pinion {
namespace {

// Unused records that move between a thread and the shared list at a time.
constexpr int kBatch = 64;

}  // namespace

void PinnedBlockRecord::Use(const c10::Stream& stream, absl::StatusOr<StreamUse> use) {
  const MutexLock lock(mu_);
  used_.store(true, std::memory_order_relaxed);
  uses_.never_reusable.Update(use.status());
  const auto same_stream = [&stream](const StreamUse& known) {
    return known.stream.torch == stream;
  };
  if (use.ok() && std::none_of(uses_.streams.begin(), uses_.streams.end(), same_stream)) {
    uses_.streams.push_back(*std::move(use));
  }
}

BlockUses PinnedBlockRecord::TakeUses() {
  const MutexLock lock(mu_);
  used_.store(false, std::memory_order_relaxed);
  return std::exchange(uses_, {});
}

PinnedBlockRecord& PinnedBlockRegistry::AddSlowly(int thread, PinnedBlock& block) {
  const MutexLock lock(mu_);
  if (slots_[thread].unused == nullptr) Refill(slots_[thread]);
  return AddOn(thread, block);
}

PinnedBlock PinnedBlockRegistry::RemoveSlowly(int thread, PinnedBlockRecord& record) {
  const MutexLock lock(mu_);
  if (slots_[thread].unused_count >= kMostUnused) HandBack(slots_[thread]);
  return RemoveOn(thread, record);
}

bool PinnedBlockRecord::IsAt(const void* data) const {
  // Equal ids before and after mean one block: ids are never reused, and a record that changes has
  // none.
  const uint64_t id = id_.load(std::memory_order_acquire);
  const char* const begin = begin_.load(std::memory_order_acquire);
  const char* const end = end_.load(std::memory_order_acquire);
  const auto* const address = static_cast<const char*>(data);
  return id != 0 && begin <= address && address < end && id_.load(std::memory_order_relaxed) == id;
}

PinnedBlockRecord* PinnedBlockRegistry::FindByContext(const void* data, const void* context) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    PinnedBlockRecord* const chunk = chunks_[i].load(std::memory_order_acquire);
    if (chunk == nullptr) break;
    const auto offset = reinterpret_cast<uintptr_t>(context) - reinterpret_cast<uintptr_t>(chunk);
    constexpr size_t kBytes = sizeof(PinnedBlockRecord);
    if (offset >= RecordsOf(i) * kBytes || offset % kBytes != 0) continue;
    PinnedBlockRecord& record = chunk[offset / kBytes];
    return record.IsAt(data) ? &record : nullptr;
  }
  return nullptr;
}

PinnedBlockRecord* PinnedBlockRegistry::FindByAddress(const void* data) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    PinnedBlockRecord* const chunk = chunks_[i].load(std::memory_order_acquire);
    if (chunk == nullptr) break;
    PinnedBlockRecord* const end = chunk + RecordsOf(i);
    PinnedBlockRecord* const found = std::find_if(
        chunk, end, [data](const PinnedBlockRecord& record) { return record.IsAt(data); });
    if (found != end) return found;
  }
  return nullptr;
}

void PinnedBlockRegistry::Refill(Slot& slot) {
  if (unused_ == nullptr) {
    const size_t chunk = records_.size();
    const size_t count = RecordsOf(chunk);
    PinnedBlockRecord* const records =
        records_.emplace_back(std::make_unique<PinnedBlockRecord[]>(count)).get();
    for (size_t i = count; i-- > 0;) {
      records[i].registry_ = this;
      records[i].next_ = std::exchange(unused_, &records[i]);
    }
    chunks_[chunk].store(records, std::memory_order_release);
  }
  for (int i = 0; i < kBatch && unused_ != nullptr; ++i) {
    PinnedBlockRecord* const record = std::exchange(unused_, unused_->next_);
    record->next_ = std::exchange(slot.unused, record);
    ++slot.unused_count;
  }
}

void PinnedBlockRegistry::HandBack(Slot& slot) {
  for (int i = 0; i < kBatch; ++i) {
    PinnedBlockRecord* const record = std::exchange(slot.unused, slot.unused->next_);
    record->next_ = std::exchange(unused_, record);
    --slot.unused_count;
  }
}

PinnedBlockRegistry::Stats PinnedBlockRegistry::SumLocked() const {
  Stats stats;
  for (const Slot& slot : slots_) {
    slot.requests.AddTo(&stats.requests);
    slot.bytes.AddTo(&stats.bytes);
  }
  return stats;
}

PinnedBlockRegistry::Stats PinnedBlockRegistry::GetStats() {
  const MutexLock lock(mu_);
  Stats stats = SumLocked();
  stats.requests.allocated -= before_reset_.requests.allocated;
  stats.requests.freed -= before_reset_.requests.freed;
  stats.bytes.allocated -= before_reset_.bytes.allocated;
  stats.bytes.freed -= before_reset_.bytes.freed;
  return stats;
}

void PinnedBlockRegistry::ResetAccumulated() {
  const MutexLock lock(mu_);
  before_reset_ = SumLocked();
}

void PinnedBlockRegistry::ResetPeaks() {
  for (Slot& slot : slots_) {
    slot.requests.ResetPeak();
    slot.bytes.ResetPeak();
  }
}

void PinnedBlockRegistry::Count::AddTo(c10::CachingAllocator::Stat* stat) const {
  const int64_t freed = fallen();
  const int64_t allocated = risen_.load(std::memory_order_relaxed);
  stat->allocated += allocated;
  stat->freed += freed;
  stat->current += allocated - freed;
  stat->peak += std::max(allocated - freed, peak_.load(std::memory_order_relaxed));
}

}  // namespace pinion
