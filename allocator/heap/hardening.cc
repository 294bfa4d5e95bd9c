#include "pinion/allocator/heap/hardening.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"

namespace pinion::internal {
namespace {

// Returns the offset of the first byte other than `pattern`, or `size_bytes`.
uint64_t FirstOther(const char* data, uint64_t size_bytes, unsigned char pattern) {
  const char expected = static_cast<char>(pattern);
  // Under a sanitizer, memcmp with itself one byte on is many times faster than a loop.
  if (size_bytes == 0 ||
      (data[0] == expected && std::memcmp(data, data + 1, size_bytes - 1) == 0)) {
    return size_bytes;
  }
  return static_cast<uint64_t>(
      std::find_if(data, data + size_bytes, [expected](char byte) { return byte != expected; }) -
      data);
}

std::string Name(uint64_t id, uint64_t size_bytes, const void* data) {
  return absl::StrCat("block ", id, " (", size_bytes, " bytes at 0x",
                      absl::Hex(reinterpret_cast<uintptr_t>(data)), ")");
}

// Recent releases, for messages: a record loses its block when it joins a neighbour. Relaxed, so
// that ThreadSanitizer sees no ordering. A torn entry only gives a wrong hint.
class RecentReleases {
 public:
  void Remember(const BlockRecord& block) {
    Entry& entry = entries_[next_.fetch_add(1, std::memory_order_relaxed) % kEntries];
    entry.data.store(block.data, std::memory_order_relaxed);
    entry.capacity_bytes.store(block.capacity_bytes, std::memory_order_relaxed);
    entry.size_bytes.store(block.size_bytes, std::memory_order_relaxed);
    entry.id.store(block.id, std::memory_order_relaxed);
  }

  // Returns the name of the last block that contained this byte.
  std::string NameAt(const char* byte) const {
    return NameIf([byte](const char* data, uint64_t capacity_bytes, uint64_t) {
      return data <= byte && byte < data + capacity_bytes;
    });
  }
  std::string NameOf(uint64_t id) const {
    return NameIf([id](const char*, uint64_t, uint64_t other) { return other == id; });
  }

 private:
  static constexpr uint64_t kEntries = 4096;

  struct Entry {
    std::atomic<const char*> data = nullptr;
    std::atomic<uint64_t> capacity_bytes = 0;
    std::atomic<uint64_t> size_bytes = 0;
    std::atomic<uint64_t> id = 0;
  };

  // Returns "" if no entry matches.
  template <typename Matches>
  std::string NameIf(Matches matches) const {
    const uint64_t next = next_.load(std::memory_order_relaxed);
    for (uint64_t back = 1; back <= std::min(next, kEntries); ++back) {
      const Entry& entry = entries_[(next - back) % kEntries];
      const char* const data = entry.data.load(std::memory_order_relaxed);
      const uint64_t id = entry.id.load(std::memory_order_relaxed);
      if (matches(data, entry.capacity_bytes.load(std::memory_order_relaxed), id)) {
        return Name(id, entry.size_bytes.load(std::memory_order_relaxed), data);
      }
    }
    return "";
  }

  std::atomic<uint64_t> next_ = 0;
  std::array<Entry, kEntries> entries_ = {};
};

constinit RecentReleases recent_releases;

// Dies if free memory was written to. `found` says when that was found. It is called for a failure
// only, because the heap may have no memory for a text.
void CheckFree(const char* data, uint64_t size_bytes, absl::FunctionRef<std::string()> found) {
  const uint64_t offset = FirstOther(data, size_bytes, kFreePattern);
  if (offset == size_bytes) return;
  const char* const byte = data + offset;
  const std::string name = recent_releases.NameAt(byte);
  PINION_CHECK(offset == size_bytes)
      << (name.empty() ? "free host memory" : name) << " was written to after its release, at "
      << static_cast<const void*>(byte) << " (found when " << found()
      << "). Release a block that a device still uses with the copy's ticket: ReleaseAfter. Do not "
         "use data() after the release.";
}

}  // namespace

void DieOfRelease(const BlockRecord& block, uint64_t id) {
  const bool known =
      block.id == id && (block.state == BlockState::kLive || block.state == BlockState::kReleased ||
                         block.state == BlockState::kDeferred);
  std::string name = known ? Name(id, block.size_bytes, block.data) : recent_releases.NameOf(id);
  if (name.empty()) name = absl::StrCat("block ", id);
  PINION_CHECK(false)
      << name << " is released, but it is not live: it was released before. A block is released "
      << "once, by its PinnedBlock: look for one that was copied byte by byte or destroyed twice.";
}

void PoisonFree(void* data, uint64_t size_bytes) { std::memset(data, kFreePattern, size_bytes); }

void CheckFreeSegment(const HostSegment& segment) {
  CheckFree(static_cast<const char*>(segment.data), segment.size_bytes,
            [] { return std::string("its segment was given back"); });
}

void PrepareBlock(const BlockRecord& block) {
  CheckFree(block.data, block.capacity_bytes,
            [&block] { return absl::StrCat("it became block ", block.id); });
  std::memset(block.data + block.size_bytes, kRedZonePattern,
              block.capacity_bytes - block.size_bytes);
}

void CheckAndPoisonBlock(const BlockRecord& block) {
  const uint64_t room = block.capacity_bytes - block.size_bytes;
  const uint64_t offset = FirstOther(block.data + block.size_bytes, room, kRedZonePattern);
  PINION_CHECK(offset == room) << Name(block.id, block.size_bytes, block.data)
                               << " was written to beyond its end, at byte "
                               << block.size_bytes + offset
                               << ". A copy or a loop is longer than the block: allocate all "
                                  "bytes that are written.";
  recent_releases.Remember(block);
  PoisonFree(block.data, block.capacity_bytes);
}

}  // namespace pinion::internal
