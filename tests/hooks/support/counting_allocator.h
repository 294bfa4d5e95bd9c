// Replaces LibTorch's allocator of a device type for its lifetime, and counts the calls that are
// expensive on CUDA.
//
//   CountingAllocator allocator(world.device().type());
//   allocator.is_full = true;     // empties its cache before each allocation from here on

#ifndef PINION_TESTS_HOOKS_SUPPORT_COUNTING_ALLOCATOR_H_
#define PINION_TESTS_HOOKS_SUPPORT_COUNTING_ALLOCATOR_H_

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pinion::testing {

class CountingAllocator : public c10::DeviceAllocator {
 public:
  explicit CountingAllocator(c10::DeviceType type)
      : type_(type), counted_(*c10::getDeviceAllocator(type)) {
    c10::SetAllocator(type_, this);
  }
  ~CountingAllocator() override { c10::SetAllocator(type_, &counted_); }

  int caches_emptied() const { return caches_emptied_; }
  std::atomic<bool> is_full = false;

  void emptyCache(c10::MempoolId_t pool) override {
    ++caches_emptied_;
    counted_.emptyCache(pool);
  }
  c10::DataPtr allocate(size_t size_bytes) override {
    if (is_full) ++retries_;
    return counted_.allocate(size_bytes);
  }
  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    counted_.copy_data(to, from, size_bytes);
  }
  bool initialized() override { return counted_.initialized(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    counted_.recordStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats = counted_.getDeviceStats(device);
    stats.num_alloc_retries = retries_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    counted_.resetAccumulatedStats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override { counted_.resetPeakStats(device); }

 private:
  const c10::DeviceType type_;
  c10::DeviceAllocator& counted_;
  int caches_emptied_ = 0;
  std::atomic<int64_t> retries_ = 0;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_COUNTING_ALLOCATOR_H_
