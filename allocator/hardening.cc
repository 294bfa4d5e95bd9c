#include "pinion/allocator/hardening.h"

#include <algorithm>
#include <cstring>

#include "pinion/allocator/base/check.h"

namespace pinion::internal {
namespace {

constexpr unsigned char kFreePattern = 0xF5;
constexpr unsigned char kRedZonePattern = 0xBD;

// The offset of the first byte that is not `pattern`; `size_bytes` if all are.
uint64_t FirstOther(const char* data, uint64_t size_bytes, unsigned char pattern) {
  const char expected = static_cast<char>(pattern);
  // memcmp against itself one byte on is many times faster than a loop under a sanitizer.
  if (size_bytes == 0 ||
      (data[0] == expected && std::memcmp(data, data + 1, size_bytes - 1) == 0)) {
    return size_bytes;
  }
  return static_cast<uint64_t>(
      std::find_if(data, data + size_bytes, [expected](char byte) { return byte != expected; }) -
      data);
}

}  // namespace

void PoisonFree(void* data, uint64_t size_bytes) { std::memset(data, kFreePattern, size_bytes); }

void PrepareBlock(const BlockRecord& block) {
  const uint64_t offset = FirstOther(block.data, block.capacity_bytes, kFreePattern);
  PINION_CHECK(offset == block.capacity_bytes)
      << "free pinned memory at " << static_cast<const void*>(block.data) << " + " << offset
      << " was written to after its block was released (found when it became block " << block.id
      << "). Whoever lets a device write to a block releases it with the copy's ticket.";
  std::memset(block.data + block.size_bytes, kRedZonePattern,
              block.capacity_bytes - block.size_bytes);
}

void CheckAndPoisonBlock(const BlockRecord& block) {
  const uint64_t room = block.capacity_bytes - block.size_bytes;
  const uint64_t offset = FirstOther(block.data + block.size_bytes, room, kRedZonePattern);
  PINION_CHECK(offset == room) << "pinned block " << block.id << " of " << block.size_bytes
                               << " bytes at " << static_cast<const void*>(block.data)
                               << " was written to beyond its end, at byte "
                               << block.size_bytes + offset << ".";
  PoisonFree(block.data, block.capacity_bytes);
}

}  // namespace pinion::internal
