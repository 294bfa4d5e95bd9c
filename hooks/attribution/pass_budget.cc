#include "pinion/hooks/attribution/pass_budget.h"

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// The allocator rounds each tensor up, and not in proportion to its rows.
constexpr double kRoomForRows = 63.0 / 64;

// The most that each device has had.
class PassPeaks final : public MemoryObserver {
 public:
  PassPeaks(c10::DeviceType type, std::vector<int64_t> now_bytes)
      : type_(type), peak_bytes_(std::move(now_bytes)) {}

  void OnDeviceBytes(c10::Device device, int64_t allocated_bytes, const void*) override {
    if (device.type() != type_) return;
    const auto index = static_cast<size_t>(device.index());
    const MutexLock lock(mu_);
    if (index < peak_bytes_.size()) {
      peak_bytes_[index] = std::max(peak_bytes_[index], allocated_bytes);
    }
    has_seen_any_ = true;
  }

  std::vector<int64_t> peak_bytes() const {
    const MutexLock lock(mu_);
    TORCH_CHECK(has_seen_any_,
                "a budget for device memory needs to see what a pass takes, which "
                "a profiler hides: stop it, or leave device_budget_bytes at 0");
    return peak_bytes_;
  }

 private:
  const c10::DeviceType type_;
  mutable Mutex mu_;
  std::vector<int64_t> peak_bytes_ ABSL_GUARDED_BY(mu_);
  bool has_seen_any_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

PassBudget::PassBudget(uint64_t budget_bytes, c10::DeviceType type)
    : budget_bytes_(budget_bytes), type_(type) {
  if (!has_bound()) return;
  TORCH_CHECK(type != c10::DeviceType::CPU && TellsAllocatedBytes(type), "a budget of ",
              budget_bytes,
              " bytes is for a device that tells what it has given "
              "out, and \"",
              c10::DeviceTypeName(type, /*lower_case=*/true),
              "\" does not: leave device_budget_bytes at 0");
  const c10::impl::VirtualGuardImpl guard(type);
  for (int index = 0; index < guard.deviceCount(); ++index) {
    const c10::Device device(type, static_cast<c10::DeviceIndex>(index));
    held_bytes_.push_back(AllocatedBytes(device));
    TORCH_CHECK_WITH(OutOfMemoryError, held_bytes_.back() < static_cast<int64_t>(budget_bytes),
                     device, " holds ", held_bytes_.back(),
                     " bytes before the first pass, and "
                     "the budget is ",
                     budget_bytes,
                     ": raise device_budget_bytes, or let go of "
                     "some memory");
  }
}

double PassBudget::MostRows(const Observed& observed) const {
  return std::min(most_rows_, observed.rows * kRoomForRows / observed.share);
}

int64_t PassBudget::Examples(int64_t left, int64_t least_steps) const {
  if (!has_bound()) return left;
  const auto steps = static_cast<double>(least_steps);
  double examples = 1;
  for (const Observed& observed : observed_) {
    if (observed.steps <= steps) examples = std::max(examples, MostRows(observed) / steps);
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

void PassBudget::Run(const PassRows& rows, const std::function<void()>& pass) {
  if (!has_bound()) return pass();
  const auto peaks = std::make_shared<PassPeaks>(type_, held_bytes_);
  {
    const MemoryScope observed(peaks);
    pass();
  }
  Observed now = {static_cast<double>(rows.size()), static_cast<double>(rows.steps), 1e-6};
  const std::vector<int64_t> peak_bytes = peaks->peak_bytes();
  const auto budget = static_cast<double>(budget_bytes_);
  for (size_t device = 0; device < peak_bytes.size(); ++device) {
    const auto held = static_cast<double>(held_bytes_[device]);
    now.share =
        std::max(now.share, (static_cast<double>(peak_bytes[device]) - held) / (budget - held));
    TORCH_CHECK_WITH(OutOfMemoryError, now.share <= 1 || !observed_.empty(), "the smallest pass, ",
                     rows.examples, " example at ", rows.steps, " steps, takes up to ",
                     peak_bytes[device], " bytes of device ", device, ", and the budget is ",
                     budget_bytes_,
                     ": raise device_budget_bytes to that, or run the forward "
                     "function in an OffloadScope");
  }
  if (now.share > 1) most_rows_ = MostRows(now);
  observed_.push_back(now);
}

void ForEachPass(PassBudget& budget, const PassGrid& grid,
                 const std::function<void(const PassRows&)>& pass) {
  PassRows rows;
  while (rows.first_example < grid.examples) {
    rows.examples = budget.Examples(grid.examples - rows.first_example, grid.overlap + 1);
    for (rows.first_step = 0; rows.first_step + grid.overlap < grid.steps;
         rows.first_step += rows.steps - grid.overlap) {
      rows.steps = budget.Steps(rows.examples, grid.steps - rows.first_step, grid.overlap + 1);
      budget.Run(rows, [&] { pass(rows); });
    }
    rows.first_example += rows.examples;
  }
}

}  // namespace pinion
