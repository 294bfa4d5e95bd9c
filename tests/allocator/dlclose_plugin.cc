// A library that uses an allocator and leaves nothing behind; dlclose_test loads it.

#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/support/heap_source.h"

namespace pinion {
namespace {

int Use(std::shared_ptr<HostMemorySource> source) {
  const absl::StatusOr<std::shared_ptr<PinnedAllocator>> allocator =
      PinnedAllocator::Create({}, std::move(source));
  if (!allocator.ok()) return 1;
  for (const uint64_t size_bytes : {kKiB, 100 * kKiB, 5 * kMiB}) {
    absl::StatusOr<PinnedBlock> block = (*allocator)->Allocate(size_bytes);
    if (!block.ok()) return 2;
    std::memset(block->data(), 1, size_bytes);
    std::move(*block).ReleaseAfter({});
  }
  if ((*allocator)->Allocate(0).ok()) return 3;
  return (*allocator)->Trim(0).ok() ? 0 : 4;
}

int UseAll() {
  PINION_LOG(kWarning) << "from a library that will be unloaded";
  if (const int failed = Use(std::make_shared<testing::HeapSource>()); failed != 0) return failed;
  return Use(MmapSource::Create().value());
}

}  // namespace
}  // namespace pinion

extern "C" int UseTheAllocator() { return pinion::UseAll(); }

// Static objects are destroyed when the library is unloaded.
extern "C" int UseGlobals() {
  static std::shared_ptr<pinion::PinnedAllocator> allocator;
  static pinion::PinnedBlock block;
  allocator = pinion::PinnedAllocator::Create({}, pinion::MmapSource::Create().value()).value();
  block = allocator->Allocate(5 * pinion::kMiB).value();
  std::memset(block.data(), 1, block.size_bytes());
  return 0;
}

// Per-thread state is created by its thread and destroyed with it.
extern "C" int UseTheAllocatorOnAnotherThread() {
  int result = -1;
  std::thread([&] { result = pinion::UseAll(); }).join();
  return result;
}
