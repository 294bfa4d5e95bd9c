#include "pinion/hooks/plan/device_peaks.h"

#include <algorithm>
#include <utility>

namespace pinion {

void DevicePeaks::OnDeviceBytes(int64_t allocated_bytes, const void* freed, int64_t added_bytes) {
  MutexLock lock(mu_);
  since_.added_bytes += added_bytes;
  if (freed != nullptr) {
    if (since_.told.size() < kMaxTold) since_.told.push_back(freed);
    if (held_.erase(freed) > 0) since_.freed.push_back({.data = freed});
  }
  since_.peak_bytes = std::max(since_.peak_bytes, allocated_bytes);
  if (since_.freed.empty()) return;
  int64_t& later_peak_bytes = since_.freed.back().later_peak_bytes;
  later_peak_bytes = std::max(later_peak_bytes, allocated_bytes);
}

void DevicePeaks::Hold(const void* data) {
  MutexLock lock(mu_);
  held_.insert(data);
}

void DevicePeaks::Drop(const void* data) {
  MutexLock lock(mu_);
  held_.erase(data);
}

DevicePeaks::Since DevicePeaks::Take(int64_t allocated_bytes, std::optional<int64_t> frees) {
  MutexLock lock(mu_);
  Since since = std::move(since_);
  since_.peak_bytes = allocated_bytes;
  since_.freed.clear();
  since_.told.clear();
  since_.added_bytes = 0;
  since.peak_bytes = std::max(since.peak_bytes, allocated_bytes);
  const std::optional<int64_t> last_frees = std::exchange(frees_, frees);
  since.told_all = frees.has_value() && last_frees.has_value() &&
                   *frees - *last_frees == static_cast<int64_t>(since.told.size());
  return since;
}

}  // namespace pinion
