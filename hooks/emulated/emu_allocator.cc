#include "pinion/hooks/emulated/emu_allocator.h"

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {

struct EmuAllocator::Block {
  std::shared_ptr<Device> device;  // keeps its machine alive
  StreamHandle stream;
  void* data;
  size_t size_bytes;
  int abandoned;  // value of abandoned_ at the allocation
  c10::Device torch_device;
};

namespace {

// Reports to LibTorch's profiler, if one is active; `size_bytes` is negative for a free, and was
// refused if `data` is null.
void Report(void* data, int64_t size_bytes, c10::Device device) {
  if (!c10::memoryProfilingEnabled()) return;
  const uint64_t in_use_bytes = Machine().memory_stats(device.index()).in_use_bytes;
  if (data == nullptr) {
    c10::reportOutOfMemoryToProfiler(size_bytes, in_use_bytes, in_use_bytes, device);
  } else {
    c10::reportMemoryUsageToProfiler(data, size_bytes, in_use_bytes, in_use_bytes, device);
  }
}

}  // namespace

EmuAllocator& EmuAllocator::Get() {
  static EmuAllocator* const allocator = new EmuAllocator;
  return *allocator;
}

c10::DataPtr EmuAllocator::allocate(size_t size_bytes) {
  return AllocateOn(CurrentDevice(), size_bytes);
}

c10::DataPtr EmuAllocator::AllocateOn(c10::DeviceIndex index, size_t size_bytes) {
  const c10::Device torch_device(kEmu, index);
  if (size_bytes == 0) return c10::DataPtr(nullptr, torch_device);
  std::shared_ptr<Device> device = SharedDeviceAt(index);
  const StreamHandle stream = CurrentHandle(index);
  const absl::StatusOr<void*> data = device->Allocate(size_bytes, stream);
  if (absl::IsResourceExhausted(data.status())) {
    out_of_memory_errors_.fetch_add(1, std::memory_order_relaxed);
    Report(nullptr, static_cast<int64_t>(size_bytes), torch_device);
  }
  ThrowIfError(data.status(), "allocating device memory");
  live_bytes_.fetch_add(static_cast<int64_t>(size_bytes), std::memory_order_relaxed);
  auto block =
      std::make_unique<Block>(Block{std::move(device), stream, *data, size_bytes,
                                    abandoned_.load(std::memory_order_relaxed), torch_device});
  Report(*data, static_cast<int64_t>(size_bytes), torch_device);
  return c10::DataPtr(*data, block.release(), &EmuAllocator::Delete, torch_device);
}

void EmuAllocator::Delete(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  const absl::Status status = block->device->Free(block->data, block->stream);
  if (!status.ok()) {
    PINION_LOG(kError) << "freeing " << block->size_bytes << " bytes of " << block->device->name()
                       << ": " << status.ToString();
  }
  EmuAllocator& allocator = Get();
  if (block->abandoned != allocator.abandoned_.load(std::memory_order_relaxed)) return;
  allocator.live_bytes_.fetch_sub(static_cast<int64_t>(block->size_bytes),
                                  std::memory_order_release);
  Report(block->data, -static_cast<int64_t>(block->size_bytes), block->torch_device);
}

void EmuAllocator::Abandon() {
  abandoned_.fetch_add(1, std::memory_order_relaxed);
  live_bytes_.store(0, std::memory_order_release);
}

void EmuAllocator::emptyCache(c10::MempoolId_t /*pool*/) {}  // nothing is cached

void EmuAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr) return;
  const auto* const block = data.cast_context<Block>(&EmuAllocator::Delete);
  if (block != nullptr && block->stream == HandleOf(stream)) return;  // its frees are ordered there
  ThrowIfError(Machine().RecordStream(data.get(), HandleOf(stream)), "recording a stream");
}

c10::CachingDeviceAllocator::DeviceStats EmuAllocator::getDeviceStats(c10::DeviceIndex index) {
  const MemoryStats memory = Machine().memory_stats(index);
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::CachingDeviceAllocator::DeviceStats stats;
  c10::CachingAllocator::Stat& bytes = stats.allocated_bytes[kAll];
  bytes.current = static_cast<int64_t>(memory.in_use_bytes);
  bytes.peak = static_cast<int64_t>(memory.peak_bytes);
  bytes.allocated = static_cast<int64_t>(memory.allocated_bytes);
  bytes.freed = bytes.allocated - bytes.current;
  stats.active_bytes[kAll] = bytes;
  stats.reserved_bytes[kAll] = bytes;
  stats.requested_bytes[kAll] = bytes;
  c10::CachingAllocator::Stat& count = stats.allocation[kAll];
  count.current = static_cast<int64_t>(memory.allocations - memory.frees);
  count.allocated = static_cast<int64_t>(memory.allocations);
  count.freed = static_cast<int64_t>(memory.frees);
  stats.active[kAll] = count;
  stats.num_ooms = out_of_memory_errors_.load(std::memory_order_relaxed);
  stats.num_device_alloc = count.allocated;
  stats.num_device_free = count.freed;
  return stats;
}

void EmuAllocator::resetAccumulatedStats(c10::DeviceIndex /*index*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "emu counts allocations from the start of the machine: take differences instead");
}

void EmuAllocator::resetPeakStats(c10::DeviceIndex index) { Machine().ResetPeakMemory(index); }

std::pair<size_t, size_t> EmuAllocator::getMemoryInfo(c10::DeviceIndex index) {
  const MemoryStats memory = Machine().memory_stats(index);
  return {memory.limit_bytes - memory.in_use_bytes, memory.limit_bytes};
}

void EmuAllocator::copy_data(void* dst, const void* src, size_t size_bytes) const {
  const c10::DeviceIndex index = CurrentDevice();
  ThrowIfError(Machine().Copy(index, dst, src, size_bytes, CurrentHandle(index)),
               "copying device memory");
}

}  // namespace pinion::emu
