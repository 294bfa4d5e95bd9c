// The allocator alone, without a device: what is released serves the next request.
#include <cstdio>
#include <cstring>

#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/sources/mmap_source.h"

int main() {
  pinion::AllocatorOptions options;
  options.segment_bytes = 16 << 20;
  const auto allocator =
      pinion::PinnedAllocator::Create(options, pinion::MmapSource::Create().value()).value();
  for (int step = 0; step < 3; ++step) {
    const pinion::PinnedBlock block = allocator->Allocate(5 << 20).value();
    std::memset(block.data(), step, block.size_bytes());
  }

  const pinion::AllocatorStats stats = allocator->GetStats();
  std::printf("%s\n", stats.ToString().c_str());
  const bool cached = stats.misses == 1 && stats.hits == 2 && stats.booked_bytes.current == 0;
  if (!cached) std::printf("expected 1 miss, 2 hits, and nothing booked\n");
  return cached ? 0 : 1;
}
