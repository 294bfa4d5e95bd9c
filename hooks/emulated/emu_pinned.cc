#include "pinion/hooks/emulated/emu_pinned.h"

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {

struct EmuPinnedAllocator::Block {
  std::shared_ptr<Device> device;  // keeps the machine and its source alive
  std::shared_ptr<HostMemorySource> source;
  HostSegment segment;
  std::deque<c10::Event> uses;

  ~Block() {
    const absl::Status status = source->Free(segment);
    if (!status.ok()) PINION_LOG(kError) << "unpinning host memory: " << status.ToString();
  }
  bool InUse() const {
    return std::any_of(uses.begin(), uses.end(),
                       [](const c10::Event& event) { return !event.query(); });
  }
};

EmuPinnedAllocator& EmuPinnedAllocator::Get() {
  static EmuPinnedAllocator* const allocator = new EmuPinnedAllocator;
  return *allocator;
}

c10::DataPtr EmuPinnedAllocator::allocate(size_t size_bytes) {
  const c10::Device cpu(c10::kCPU);
  if (size_bytes == 0) return c10::DataPtr(nullptr, cpu);
  empty_cache();
  std::shared_ptr<Device> device = SharedDeviceAt(CurrentDevice());
  std::shared_ptr<HostMemorySource> source = device->pinned_source();
  const uint64_t granularity = source->granularity_bytes();
  const absl::StatusOr<HostSegment> segment =
      source->Allocate((size_bytes + granularity - 1) / granularity * granularity);
  ThrowIfError(segment.status(), "pinning host memory");
  std::unique_ptr<Block> block(new Block{std::move(device), std::move(source), *segment, {}});
  {
    const MutexLock lock(mu_);
    live_.insert(block.get());
  }
  return c10::DataPtr(segment->data, block.release(), &EmuPinnedAllocator::Delete, cpu);
}

void EmuPinnedAllocator::Delete(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  EmuPinnedAllocator& self = Get();
  {
    const MutexLock lock(self.mu_);
    self.live_.erase(block.get());
    if (!block->uses.empty()) self.released_.push_back(std::move(block));
  }
}

bool EmuPinnedAllocator::record_event(void* /*data*/, void* context, c10::Stream stream) {
  auto* const block = static_cast<Block*>(context);
  {
    const MutexLock lock(mu_);
    if (live_.count(block) == 0) return false;
  }
  c10::Event event(kEmu);
  event.record(stream);
  const MutexLock lock(mu_);
  block->uses.push_back(std::move(event));
  return true;
}

void EmuPinnedAllocator::empty_cache() {
  std::vector<std::unique_ptr<Block>> released;
  {
    const MutexLock lock(mu_);
    released.swap(released_);
  }
  // Blocks in use return to the list; the others are unpinned here, without the lock.
  const auto in_use = std::partition(released.begin(), released.end(),
                                     [](const auto& block) { return !block->InUse(); });
  const MutexLock lock(mu_);
  released_.insert(released_.end(), std::make_move_iterator(in_use),
                   std::make_move_iterator(released.end()));
}

at::HostStats EmuPinnedAllocator::get_stats() {
  at::HostStats stats;
  const MutexLock lock(mu_);
  for (const Block* block : live_) {
    stats.allocated_bytes.current += static_cast<int64_t>(block->segment.size_bytes);
  }
  return stats;
}

void EmuPinnedAllocator::copy_data(void* dst, const void* src, size_t size_bytes) const {
  default_copy_data(dst, src, size_bytes);
}

}  // namespace pinion::emu
