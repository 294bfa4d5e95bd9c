// A heap for small objects that are created and destroyed by the thousand. It reuses their memory
// for objects of the same size.
//
//   std::allocate_shared<Record>(SlabAllocator<Record>(), ...);
//   class Handle final : public SlabObject<Handle> { ... };   // std::make_unique<Handle>(...)
//
// The C library's heap caches only seven blocks per size and thread. Here a thread reuses the block
// that it freed last. Threads exchange blocks by batches, through a shared list.
//
// Threads without a number (thread_slot.h) share one cache with a lock. They get no number here: a
// thread that only frees should not use one up.
//
// Memory is never returned to the C++ heap. The process keeps as many blocks as it ever used at
// once, plus the blocks that wait in other threads' caches.
//
// Thread safety: thread-safe. A block may be freed on any thread.

#ifndef PINION_ALLOCATOR_BASE_SLAB_H_
#define PINION_ALLOCATOR_BASE_SLAB_H_

#include <array>
#include <cstddef>
#include <new>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"

namespace pinion {

// Blocks of one size. The destructor leaks them.
class Slab {
 public:
  // Alignment of each block.
  static constexpr size_t kAlignmentBytes = 64;
  // Number of blocks that threads exchange at once.
  static constexpr int kBatch = 64;

  // `block_bytes` is positive and a multiple of kAlignmentBytes.
  constexpr explicit Slab(size_t block_bytes) : block_bytes_(block_bytes) {}
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  void* Take() {
    const int slot = ThreadSlotIfAny();
    return slot == kNoThreadSlot ? TakeWithoutSlot() : TakeFrom(caches_[slot]);
  }

  void Give(void* memory) {
    const int slot = ThreadSlotIfAny();
    return slot == kNoThreadSlot ? GiveWithoutSlot(memory) : GiveTo(caches_[slot], memory);
  }

 private:
  // The content of a free block.
  struct Block {
    Block* next;        // of its batch
    Block* next_batch;  // of the first block of a batch that is shared
  };
  struct Batch {
    void* Take() {
      Block* const block = first;
      first = block->next;
      --size;
      return block;
    }
    void Give(void* memory) {
      first = ::new (memory) Block{first, nullptr};
      ++size;
    }
    Block* first = nullptr;
    int size = 0;
  };
  // The cache of one thread. The second batch keeps a thread that alternates between Take and Give
  // from exchanging a batch each time.
  struct alignas(kAlignmentBytes) Cache {
    Batch current;
    Batch aside;  // full or empty
  };

  // Prefetches the whole next block, because its user writes all of it soon. `block` may be null.
  void Prefetch(const Block* block) const {
    const char* const begin = reinterpret_cast<const char*>(block);
    for (size_t offset = 0; begin != nullptr && offset < block_bytes_; offset += kAlignmentBytes) {
      __builtin_prefetch(begin + offset, /*rw=*/1);
    }
  }

  void* TakeFrom(Cache& cache) {
    if (cache.current.first == nullptr) Reload(cache);
    void* const taken = cache.current.Take();
    Prefetch(cache.current.first);
    return taken;
  }
  void GiveTo(Cache& cache, void* memory) {
    if (cache.current.size == kBatch) PutAside(cache);
    cache.current.Give(memory);
  }

  // For threads without a number.
  void* TakeWithoutSlot();
  void GiveWithoutSlot(void* memory);
  // Allocates a batch as one piece: single blocks would fragment the C++ heap.
  Batch NewBatch() const;
  void Reload(Cache& cache);
  void PutAside(Cache& cache);

  const size_t block_bytes_;
  std::array<Cache, kThreadSlots> caches_ = {};
  Mutex mu_;
  Block* shared_ ABSL_GUARDED_BY(mu_) = nullptr;  // full batches
  Mutex others_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  Cache others_ ABSL_GUARDED_BY(others_mu_);  // of threads without a number
};

// The process's slabs, by size.
inline constexpr size_t kLargestSlabBytes = 1024;
namespace internal {
extern std::array<Slab, kLargestSlabBytes / Slab::kAlignmentBytes> slabs;
}  // namespace internal

template <size_t size_bytes>
Slab& SlabFor() {
  static_assert(size_bytes > 0 && size_bytes <= kLargestSlabBytes);
  return internal::slabs[(size_bytes - 1) / Slab::kAlignmentBytes];
}

// For std::allocate_shared, one object at a time. Under sanitizers each object is allocated by
// itself.
template <typename T>
struct SlabAllocator {
  using value_type = T;

  SlabAllocator() = default;
  template <typename Other>
  SlabAllocator(const SlabAllocator<Other>&) {}  // NOLINT: allocators convert

#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  T* allocate(size_t) { return static_cast<T*>(::operator new(sizeof(T))); }
  void deallocate(T* object, size_t) { ::operator delete(object); }
#else
  T* allocate(size_t) { return static_cast<T*>(SlabFor<sizeof(T)>().Take()); }
  void deallocate(T* object, size_t) { SlabFor<sizeof(T)>().Give(object); }
#endif
  static_assert(alignof(T) <= alignof(std::max_align_t));

  friend bool operator==(const SlabAllocator&, const SlabAllocator&) { return true; }
};

// A base class for objects that `new` makes one at a time.
template <typename Object>
struct SlabObject {
  static void* operator new(size_t) { return SlabAllocator<Object>().allocate(1); }
  static void operator delete(void* object) {
    SlabAllocator<Object>().deallocate(static_cast<Object*>(object), 1);
  }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_SLAB_H_
