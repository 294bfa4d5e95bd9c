#include "pinion/allocator/adaptors/tracking_source.h"

#include <execinfo.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "absl/debugging/symbolize.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr int kMaxFrames = 32;

// By the tables of exceptions: optimised code has no frame pointers to follow. Not inlined, so that
// it is always two frames that are not the caller's.
[[gnu::noinline]] std::vector<void*> CallersStack() {
  void* frames[kMaxFrames];
  const int count = backtrace(frames, kMaxFrames);
  // Without this function and Allocate.
  return std::vector<void*>(frames + std::min(count, 2), frames + count);
}

}  // namespace

TrackingSource::~TrackingSource() {
  if (InForkedChild() || held_bytes() == 0) return;
  PINION_LOG(kError) << name() << " goes while " << HumanBytes(held_bytes()) << " are held:\n"
                     << Report();
}

uint64_t TrackingSource::held_bytes() const {
  MutexLock lock(mu_);
  uint64_t bytes = 0;
  for (const auto& [_, held] : held_) bytes += held.size_bytes;
  return bytes;
}

std::string TrackingSource::Report() const {
  struct Sum {
    uint64_t size_bytes = 0;
    uint64_t segments = 0;
  };
  std::map<Stack, Sum> sums;
  {
    MutexLock lock(mu_);
    for (const auto& [_, held] : held_) {
      Sum& sum = sums[held.stack];
      sum.size_bytes += held.size_bytes;
      ++sum.segments;
    }
  }
  std::vector<std::pair<Stack, Sum>> sorted(sums.begin(), sums.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.size_bytes > b.second.size_bytes;
  });
  std::ostringstream out;
  for (const auto& [stack, sum] : sorted) {
    out << HumanBytes(sum.size_bytes) << " in " << sum.segments << " segments from\n";
    for (void* frame : stack) {
      // The return address may be the first of the next function.
      void* call = static_cast<char*>(frame) - 1;
      char function[256];
      const bool known = absl::Symbolize(call, function, sizeof(function));
      out << "  " << call << ' ' << (known ? function : "?") << '\n';
    }
  }
  return out.str();
}

absl::StatusOr<HostSegment> TrackingSource::Allocate(uint64_t size_bytes) {
  absl::StatusOr<HostSegment> segment = SourceAdaptor::Allocate(size_bytes);
  if (!segment.ok()) return segment;
  Held held{.size_bytes = segment->size_bytes, .stack = CallersStack()};
  MutexLock lock(mu_);
  held_[segment->data] = std::move(held);
  return segment;
}

absl::Status TrackingSource::Free(const HostSegment& segment) {
  if (InForkedChild()) return absl::OkStatus();
  {
    // Before the memory goes: another thread may be given the same address at once.
    MutexLock lock(mu_);
    const auto found = held_.find(segment.data);
    PINION_CHECK(found != held_.end() && found->second.size_bytes == segment.size_bytes)
        << name() << " does not hold " << HumanBytes(segment.size_bytes) << " at " << segment.data;
    held_.erase(found);
  }
  return SourceAdaptor::Free(segment);
}

}  // namespace pinion
