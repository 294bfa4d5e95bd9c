// LibTorch's allocator of "emu" memory: the machine's stream-ordered arenas, without a cache.
//
// Memory is allocated for the current stream of its device and freed on that stream. An
// out-of-memory error is a c10::OutOfMemoryError with the machine's report of who holds what.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_EMULATED_EMU_ALLOCATOR_H_
#define PINION_HOOKS_EMULATED_EMU_ALLOCATOR_H_

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace pinion::emu {

class EmuAllocator final : public c10::DeviceAllocator {
 public:
  static EmuAllocator& Get();

  // On the current device and its current stream.
  c10::DataPtr allocate(size_t size_bytes) override;
  c10::DataPtr AllocateOn(c10::DeviceIndex index, size_t size_bytes);

  // Memory that tensors hold, but for that of machines before Abandon().
  int64_t live_bytes() const { return live_bytes_.load(std::memory_order_acquire); }
  // What tensors hold is theirs for ever, and keeps its machine: nothing can be freed on a device
  // that is broken. Not while others allocate or free.
  void Abandon();

  // By which to tell memory that this allocator has given out. LibTorch asks it to free what
  // raw_allocate has given, which it refuses of an allocator like this one.
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override;
  void resetAccumulatedStats(c10::DeviceIndex index) override;
  void resetPeakStats(c10::DeviceIndex index) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override;
  void copy_data(void* dst, const void* src, size_t size_bytes) const override;

 private:
  EmuAllocator() = default;
  struct Block;
  static void Delete(void* block);

  std::atomic<int64_t> live_bytes_ = 0;
  std::atomic<int> abandoned_;  // times
  std::atomic<int64_t> out_of_memory_errors_;
};

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_ALLOCATOR_H_
