#include "pinion/allocator/base/slab.h"

#include <new>
#include <utility>

namespace pinion {
namespace internal {
namespace {

template <size_t... indices>
constexpr std::array<Slab, sizeof...(indices)> SlabsOf(std::index_sequence<indices...>) {
  return {Slab((indices + 1) * Slab::kAlignmentBytes)...};
}

}  // namespace

constinit std::array<Slab, kLargestSlabBytes / Slab::kAlignmentBytes> slabs =
    SlabsOf(std::make_index_sequence<kLargestSlabBytes / Slab::kAlignmentBytes>());

}  // namespace internal

namespace {

// In a child of fork(), a slab's lock may be taken for ever.
const ForkOrigin loaded_in;

}  // namespace

Slab::Batch Slab::NewBatch() const {
  auto* const memory =
      static_cast<char*>(::operator new(kBatch* block_bytes_, std::align_val_t(kAlignmentBytes)));
  Batch batch;
  for (int i = kBatch - 1; i >= 0; --i) batch.Give(memory + i * block_bytes_);
  return batch;
}

Slab::Batch Slab::TakeShared() {
  if (shared_ == nullptr) return Batch();
  return {.first = std::exchange(shared_, shared_->next_batch), .size = kBatch};
}

void Slab::Share(const Batch& full) { full.first->next_batch = std::exchange(shared_, full.first); }

void Slab::Reload(Cache& mine) {
  mine.current = std::exchange(mine.aside, {});
  if (mine.current.first == nullptr && !loaded_in.InForkedChild()) {
    MutexLock lock(mu_);
    mine.current = TakeShared();
  }
  if (mine.current.first == nullptr) mine.current = NewBatch();
}

void Slab::PutAside(Cache& mine) {
  const Batch full = std::exchange(mine.aside, std::exchange(mine.current, {}));
  if (full.first == nullptr || loaded_in.InForkedChild()) return;
  MutexLock lock(mu_);
  Share(full);
}

void* Slab::TakeWithoutSlot() {
  if (loaded_in.InForkedChild()) return NewBatch().Take();
  {
    MutexLock lock(mu_);
    if (others_.first == nullptr) others_ = TakeShared();
    if (others_.first != nullptr) return others_.Take();
  }
  Batch batch = NewBatch();
  void* const block = batch.Take();
  MutexLock lock(mu_);
  while (batch.first != nullptr) GiveToOthers(batch.Take());
  return block;
}

void Slab::GiveWithoutSlot(void* memory) {
  if (loaded_in.InForkedChild()) return;
  MutexLock lock(mu_);
  GiveToOthers(memory);
}

void Slab::GiveToOthers(void* memory) {
  if (others_.size == kBatch) Share(std::exchange(others_, {}));
  others_.Give(memory);
}

}  // namespace pinion
