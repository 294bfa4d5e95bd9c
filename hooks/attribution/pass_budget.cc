#include "pinion/hooks/attribution/pass_budget.h"

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// The allocator rounds each tensor up, so memory is not quite proportional to the rows.
constexpr double kRoomForRows = 63.0 / 64;

// A much larger pass may use other kernels and other allocator blocks.
constexpr double kGrowth = 8;

// Records each device's allocated bytes during a pass.
class PassPeaks final : public MemoryObserver {
 public:
  struct Device {
    bool is_used = false;
    int64_t least_bytes = 0;
    int64_t peak_bytes = 0;
  };

  PassPeaks(c10::DeviceType type, size_t devices) : type_(type), devices_(devices) {}

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, const void*) override {
    if (device.type() != type_) return;
    const MutexLock lock(mu_);
    Device& of = devices_.at(static_cast<size_t>(device.index()));
    of.least_bytes = of.is_used ? std::min(of.least_bytes, allocated_bytes) : allocated_bytes;
    of.peak_bytes = std::max(of.peak_bytes, allocated_bytes);
    of.is_used = true;
  }

  std::vector<Device> devices() const {
    const MutexLock lock(mu_);
    return devices_;
  }

 private:
  const c10::DeviceType type_;
  mutable Mutex mu_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

PassBudget::PassBudget(uint64_t budget_bytes, c10::DeviceType type)
    : budget_bytes_(budget_bytes), type_(type) {
  if (!has_bound()) return;
  TORCH_CHECK(type != c10::DeviceType::CPU && TellsAllocatedBytes(type), "device_budget_bytes is ",
              budget_bytes, ", but the allocator of \"",
              c10::DeviceTypeName(type, /*lower_case=*/true),
              "\" does not report allocated bytes: leave device_budget_bytes at 0");
  const c10::impl::VirtualGuardImpl guard(type);
  for (int index = 0; index < guard.deviceCount(); ++index) {
    held_bytes_.push_back(AllocatedBytes({type, static_cast<c10::DeviceIndex>(index)}));
  }
  const int64_t least_bytes = *std::min_element(held_bytes_.begin(), held_bytes_.end());
  TORCH_CHECK_WITH(OutOfMemoryError, least_bytes < static_cast<int64_t>(budget_bytes),
                   "each device holds ", least_bytes,
                   " bytes or more before the first pass, and the budget is ", budget_bytes,
                   ": raise device_budget_bytes, or free some device memory");
}

void PassBudget::CheckResults(const LayerOptions& options) const {
  TORCH_CHECK(!has_bound() || !options.keep_on_device,
              "results that stay on the device would take from device_budget_bytes as they grow: "
              "leave LayerOptions::keep_on_device at false, or device_budget_bytes at 0");
}

double PassBudget::MostRows(const Observed& observed) const {
  return std::min(
      {most_rows_, observed.rows * kRoomForRows / observed.share, observed.rows * kGrowth});
}

int64_t PassBudget::Examples(int64_t left) const {
  if (!has_bound()) return left;
  double examples = 1;
  for (const Observed& observed : observed_) {
    examples = std::max(examples, MostRows(observed) / observed.steps);
  }
  return std::min(left, static_cast<int64_t>(examples));
}

int64_t PassBudget::Steps(int64_t examples, int64_t left, int64_t least_steps) const {
  if (!has_bound()) return left;
  auto steps = static_cast<double>(least_steps);
  for (const Observed& observed : observed_) {
    const double can = MostRows(observed) / static_cast<double>(examples);
    if (can >= observed.steps) steps = std::max(steps, can);
  }
  return std::min(left, static_cast<int64_t>(steps));
}

QueuedPass PassBudget::Queue(const PassRows& rows,
                             const std::function<QueuedPass(const PassRows&)>& pass) {
  if (!has_bound()) return pass(rows);
  const auto peaks = std::make_shared<PassPeaks>(type_, held_bytes_.size());
  QueuedPass queued;
  {
    const MemoryScope observed(peaks);
    queued = pass(rows);
  }
  constexpr double kLeastShare = 1e-6;
  Observed now = {static_cast<double>(rows.size()), static_cast<double>(rows.steps), kLeastShare};
  int64_t most_bytes = -1;
  const std::vector<PassPeaks::Device> devices = peaks->devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    if (!devices[i].is_used) continue;
    // Memory that was freed since the method began was not the pass's.
    const int64_t held_bytes = std::min(held_bytes_[i], devices[i].least_bytes);
    const auto room = static_cast<double>(static_cast<int64_t>(budget_bytes_) - held_bytes);
    const int64_t own_bytes = devices[i].peak_bytes - held_bytes;
    // A next pass of this size has the same peak plus what this one holds for copies.
    const double own = static_cast<double>(own_bytes) + static_cast<double>(queued.held_bytes);
    now.share = std::max(now.share, room > 0 ? own / room : kGrowth);
    most_bytes = std::max(most_bytes, devices[i].peak_bytes);
  }
  TORCH_CHECK(
      most_bytes >= 0,
      "nothing was seen of what a pass takes of the device: a profiler hides it, or nothing "
      "runs there; leave device_budget_bytes at 0");
  if (most_bytes > static_cast<int64_t>(budget_bytes_)) {
    TORCH_CHECK_WITH(OutOfMemoryError, !observed_.empty(), "the smallest pass, ", rows.examples,
                     " example at ", rows.steps, " steps, takes up to ", most_bytes,
                     " bytes of a device, and the budget is ", budget_bytes_,
                     ": raise device_budget_bytes to that, or run the forward function in an "
                     "OffloadScope");
    PINION_LOG(kWarning) << "a pass of " << rows.size() << " rows took " << most_bytes
                         << " bytes of a device, and the budget is " << budget_bytes_
                         << ": passes are smaller from now on";
    most_rows_ = MostRows(now);
  }
  observed_.push_back(now);
  return queued;
}

void ForEachPass(PassBudget& budget, const PassGrid& grid,
                 const std::function<QueuedPass(const PassRows&)>& pass) {
  std::function<void()> finish_last;
  const auto queue = [&](const PassRows& rows) {
    std::function<void()> finish = budget.Queue(rows, pass).finish;
    finish_last.swap(finish);
    if (finish) finish();
  };
  PassRows rows;
  while (rows.first_example < grid.examples) {
    rows.examples = budget.Examples(grid.examples - rows.first_example);
    for (rows.first_step = 0; rows.first_step + grid.overlap < grid.steps;
         rows.first_step += rows.steps - grid.overlap) {
      rows.steps = budget.Steps(rows.examples, grid.steps - rows.first_step, grid.overlap + 1);
      queue(rows);
    }
    rows.first_example += rows.examples;
  }
  if (finish_last) finish_last();
}

}  // namespace pinion
