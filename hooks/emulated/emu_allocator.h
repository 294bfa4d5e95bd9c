// LibTorch's allocator of "emu" memory: the machine's stream-ordered arenas, without a cache.
//
// Allocates and frees on the current stream of the device. When memory runs out, allocation throws
// c10::OutOfMemoryError with the machine's report of the memory's owners.
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

  // Allocates on the current device and its current stream.
  c10::DataPtr allocate(size_t size_bytes) override;
  c10::DataPtr AllocateOn(c10::DeviceIndex index, size_t size_bytes);

  // Bytes that tensors hold, except those allocated before Abandon().
  int64_t live_bytes() const { return live_bytes_.load(std::memory_order_acquire); }
  // Gives up the memory of all tensors, which then keep their machine alive: a broken device can
  // free nothing. Call it while no other thread allocates or frees.
  void Abandon();

  // Identifies memory of this allocator. LibTorch also uses it to free raw_allocate's memory, but
  // refuses to do so for an allocator like this one.
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
  std::atomic<int> abandoned_;  // number of Abandon() calls
  std::atomic<int64_t> out_of_memory_errors_;
};

}  // namespace pinion::emu

#endif  // PINION_HOOKS_EMULATED_EMU_ALLOCATOR_H_
