// Memory for objects that come and go by the thousand, kept for the next ones of their size.
//
//   std::allocate_shared<Record>(SlabAllocator<Record>(), ...);
//   class Handle final : public SlabObject<Handle> { ... };   // std::make_unique<Handle>(...)
//
// The C library's heap is slow for these: its cache of a thread has seven blocks of a size, and
// what does not fit is joined with its neighbours and cut off again, whose headers are in no
// processor's cache by then. Here a thread takes the block that it has given back last. What one
// thread gives back and another one takes goes by batches through a list that both share.
//
// Threads that have no number (thread_slot.h) share one cache and its lock. They are not given one
// here: numbers are few, and a thread that only releases what others allocate can do without.
//
// Blocks stay blocks for good: the process keeps as many as it has had at once, and the few that
// wait in other threads' caches.
//
// Thread safety: thread-safe. A block may be given back on any thread.

#ifndef PINION_ALLOCATOR_BASE_SLAB_H_
#define PINION_ALLOCATOR_BASE_SLAB_H_

#include <array>
#include <cstddef>
#include <new>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"

namespace pinion {

// Blocks of one size. Leaks what it holds when it is destroyed.
class Slab {
 public:
  // Blocks begin at such addresses.
  static constexpr size_t kAlignmentBytes = 64;
  // Blocks that threads exchange at once.
  static constexpr int kBatch = 64;

  // `block_bytes` is positive and a multiple of kAlignmentBytes.
  constexpr explicit Slab(size_t block_bytes) : block_bytes_(block_bytes) {}
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  void* Take() {
    const int slot = ThreadSlotIfAny();
    if (slot == kNoThreadSlot) return TakeWithoutSlot();
    Cache& mine = caches_[slot];
    if (mine.current.first == nullptr) Reload(mine);
    void* const taken = mine.current.Take();
    Prefetch(mine.current.first);
    return taken;
  }

  void Give(void* memory) {
    const int slot = ThreadSlotIfAny();
    if (slot == kNoThreadSlot) return GiveWithoutSlot(memory);
    Cache& mine = caches_[slot];
    if (mine.current.size == kBatch) PutAside(mine);
    mine.current.Give(memory);
  }

 private:
  // What a block holds that nobody uses.
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
  // Of the thread that has its number. One batch beside the current one, so that a thread that
  // takes and gives in turn does not exchange a batch each time.
  struct alignas(kAlignmentBytes) Cache {
    Batch current;
    Batch aside;  // full or empty
  };

  // Whoever takes a block writes all of it, and takes the next one soon: thousands of blocks do not
  // stay in a core's own cache. `block` may be null.
  void Prefetch(const Block* block) const {
    const char* const begin = reinterpret_cast<const char*>(block);
    for (size_t offset = 0; begin != nullptr && offset < block_bytes_; offset += kAlignmentBytes) {
      __builtin_prefetch(begin + offset, /*rw=*/1);
    }
  }

  // Of threads that have no number.
  void* TakeWithoutSlot();
  void GiveWithoutSlot(void* memory);
  void GiveToOthers(void* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The blocks of a new batch lie side by side: those that other users of the heap have in between
  // would be far from each other, and so would theirs.
  Batch NewBatch() const;
  Batch TakeShared() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // empty where there is none
  void Share(const Batch& full) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reload(Cache& mine);
  void PutAside(Cache& mine);

  const size_t block_bytes_;
  std::array<Cache, kThreadSlots> caches_ = {};
  Mutex mu_;
  Block* shared_ ABSL_GUARDED_BY(mu_) = nullptr;  // full batches
  Batch others_ ABSL_GUARDED_BY(mu_);             // of the threads that have no number
};

// The process's slab for objects of that size.
inline constexpr size_t kLargestSlabBytes = 1024;
namespace internal {
extern std::array<Slab, kLargestSlabBytes / Slab::kAlignmentBytes> slabs;
}  // namespace internal

template <size_t size_bytes>
Slab& SlabFor() {
  static_assert(size_bytes > 0 && size_bytes <= kLargestSlabBytes);
  return internal::slabs[(size_bytes - 1) / Slab::kAlignmentBytes];
}

// Of std::allocate_shared, for one object at a time. Sanitizers see each object by itself.
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

// A base of a class of which `new` makes single objects: they are of a slab, too.
template <typename Object>
struct SlabObject {
  static void* operator new(size_t) { return SlabAllocator<Object>().allocate(1); }
  static void operator delete(void* object) {
    SlabAllocator<Object>().deallocate(static_cast<Object*>(object), 1);
  }
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_SLAB_H_
