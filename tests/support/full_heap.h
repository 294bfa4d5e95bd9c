// Makes heap allocations of the calling thread throw std::bad_alloc.
//
//   const FullHeap full(/*lasts=*/3);  // the fourth allocation and all later ones throw
//   const FullHeap once(/*lasts=*/3, FullHeap::Fails::kOne);  // only the fourth throws
//
// Replaces operator new: include it in one file of a test that is `alone`. At most one object per
// thread may exist.

#ifndef PINION_TESTS_SUPPORT_FULL_HEAP_H_
#define PINION_TESTS_SUPPORT_FULL_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace pinion::testing {

class FullHeap {
 public:
  enum class Fails { kAll, kOne };
  explicit FullHeap(int64_t lasts = 0, Fails fails = Fails::kAll) {
    refusals_ = 0;
    only_one_fails_ = fails == Fails::kOne;
    lasts_ = lasts;
  }
  ~FullHeap() { lasts_ = -1; }
  FullHeap(const FullHeap&) = delete;
  FullHeap& operator=(const FullHeap&) = delete;

  // Returns the allocations of this thread that have thrown since its last object was made.
  static uint64_t refusals() { return refusals_; }

  static void* Take(size_t size_bytes, size_t alignment_bytes) {
    if (lasts_ == 0) {
      ++refusals_;
      if (only_one_fails_) lasts_ = -1;
      throw std::bad_alloc();
    }
    if (lasts_ > 0) --lasts_;
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment_bytes, size_bytes) != 0) throw std::bad_alloc();
    return memory;
  }

 private:
  // Heap allocations of this thread that succeed before one fails; -1 disables failures.
  static inline thread_local int64_t lasts_ = -1;
  static inline thread_local bool only_one_fails_ = false;
  static inline thread_local uint64_t refusals_ = 0;
};

}  // namespace pinion::testing

void* operator new(size_t size_bytes) {
  return pinion::testing::FullHeap::Take(size_bytes, alignof(std::max_align_t));
}
void* operator new(size_t size_bytes, std::align_val_t alignment) {
  return pinion::testing::FullHeap::Take(size_bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

#endif  // PINION_TESTS_SUPPORT_FULL_HEAP_H_
