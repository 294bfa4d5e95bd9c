#include "pinion/allocator/base/slab.h"

#include <utility>

#include "pinion/allocator/base/fork_origin.h"

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

void Slab::Reload(Cache& cache) {
  cache.current = std::exchange(cache.aside, {});
  if (cache.current.first == nullptr && !loaded_in.InForkedChild()) {
    MutexLock lock(mu_);
    if (shared_ != nullptr) {
      cache.current = {.first = std::exchange(shared_, shared_->next_batch), .size = kBatch};
    }
  }
  if (cache.current.first == nullptr) cache.current = NewBatch();
}

void Slab::PutAside(Cache& cache) {
  const Batch full = std::exchange(cache.aside, std::exchange(cache.current, {}));
  if (full.first == nullptr || loaded_in.InForkedChild()) return;
  MutexLock lock(mu_);
  full.first->next_batch = std::exchange(shared_, full.first);
}

void* Slab::TakeWithoutSlot() {
  if (loaded_in.InForkedChild()) return NewBatch().Take();
  MutexLock lock(others_mu_);
  return TakeFrom(others_);
}

void Slab::GiveWithoutSlot(void* memory) {
  if (loaded_in.InForkedChild()) return;
  MutexLock lock(others_mu_);
  GiveTo(others_, memory);
}

}  // namespace pinion
