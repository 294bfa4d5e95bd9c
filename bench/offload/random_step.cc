#include "pinion/bench/offload/random_step.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "pinion/allocator/base/bytes.h"
#include "pinion/device/allocation_bytes.h"

namespace pinion {
namespace {

constexpr uint64_t kLeastBytes = 1024;

// Draws a forward operator by operator, then its backward.
class StepDraw {
 public:
  StepDraw(uint64_t seed, uint64_t shrink) : random_(seed), shrink_(shrink) {}

  uint64_t Below(uint64_t end) { return random_() % end; }

  void AddForward() {
    const size_t by = saved_by_.size();
    saved_by_.emplace_back();
    if (!step_.objects.empty() && Below(3) == 0) {
      const auto again = static_cast<uint32_t>(step_.objects.size() - 1 -
                                               Below(std::min<size_t>(3, step_.objects.size())));
      saved_by_[by].push_back(again);
      step_.objects[again].saved_until = static_cast<uint32_t>(step_.accesses.size());
      ++unread_[again];
      Use(again, by);
    }
    for (uint64_t makes = 1 + Below(3); makes > 0; --makes) {
      const auto object = static_cast<uint32_t>(step_.objects.size());
      saved_by_[by].push_back(object);
      // Small tensors share parcels.
      const uint64_t size_bytes = Below(3) == 0 ? kLeastBytes + Bytes(16 * kKiB) : Bytes(2 * kMiB);
      step_.objects.push_back({.size_bytes = std::max(size_bytes, kLeastBytes)});
      unread_.push_back(1);
      Use(object, by);
    }
  }

  StepTrace Finish() {
    for (size_t by = saved_by_.size(); by-- > 0;) {
      if (Below(10) == 0) continue;
      for (const uint32_t object : saved_by_[by]) {
        Use(object, 2 * saved_by_.size() - by);
        --unread_[object];
      }
    }
    const double compute_us = (1 + static_cast<double>(Below(200))) / static_cast<double>(shrink_);
    for (size_t i = 0; i <= step_.accesses.size(); ++i) {
      step_.intervals.push_back({.compute_us = Below(4) == 0 ? 0 : compute_us,
                                 .other_bytes = AllocationBytes(8 * kMiB / shrink_) + Bytes(kMiB),
                                 .transient_bytes = Below(3) == 0 ? Bytes(2 * kMiB) : 0});
    }
    for (size_t object = 0; object < step_.objects.size(); ++object) {
      if (unread_[object] > 0) {
        step_.objects[object].needed_until = static_cast<uint32_t>(step_.accesses.size());
      }
    }
    return std::move(step_);
  }

  size_t forward_uses() const { return step_.accesses.size(); }

 private:
  // Returns a size as a device rounds it.
  uint64_t Bytes(uint64_t end) { return AllocationBytes(Below(end) / shrink_); }
  void Use(uint32_t object, size_t by) {
    step_.accesses.push_back(object);
    step_.operators.push_back(static_cast<uint32_t>(by));
  }

  std::mt19937_64 random_;
  const uint64_t shrink_;
  StepTrace step_;
  std::vector<std::vector<uint32_t>> saved_by_;  // by operator
  std::vector<int> unread_;                      // saves of each object
};

// The saves of a GPT layer, operator by operator.
struct LayerSave {
  double units = 0;       // 0: saves the last but one tensor again
  double compute_us = 0;  // for units of 4 MiB; 0: the same operator
};
constexpr LayerSave kLayer[] = {
    {1, 20},    // the norm's input
    {0.01, 0},  // its mean and variance
    {1, 150},   // the input of queries, keys and values
    {3, 200},   // queries, keys and values
    {1, 0},     // attention's output
    {0.02, 0},  // its sums
    {0, 50},    // the projection's input
    {1, 20},    // the second norm's
    {0.01, 0},  // its mean and variance
    {1, 200},   // the wide part's input
    {4, 60},    // its activation's
    {4, 200},   // and its output's
};

}  // namespace

StepTrace RandomStep(uint64_t seed, uint64_t shrink) {
  StepDraw draw(seed, shrink);
  for (uint64_t operators = 4 + draw.Below(30); operators > 0; --operators) draw.AddForward();
  return draw.Finish();
}

StepTrace RandomStepOfUses(uint64_t seed, size_t uses) {
  StepDraw draw(seed, /*shrink=*/1);
  // Backward reads nine operators in ten.
  while (draw.forward_uses() * 19 / 10 < uses) draw.AddForward();
  return draw.Finish();
}

StepTrace GptLikeStep(size_t uses, uint64_t unit_bytes) {
  const double units_of_4_mib = static_cast<double>(unit_bytes) / static_cast<double>(4 * kMiB);
  StepTrace step;
  std::vector<double> compute_us;
  size_t by = 0;
  while (step.accesses.size() * 2 < uses) {
    for (const LayerSave& save : kLayer) {
      if (save.compute_us > 0) ++by;
      if (save.units == 0) {
        step.accesses.push_back(step.accesses[step.accesses.size() - 2]);
        step.objects[step.accesses.back()].saved_until =
            static_cast<uint32_t>(step.accesses.size() - 1);
      } else {
        step.accesses.push_back(static_cast<uint32_t>(step.objects.size()));
        step.objects.push_back(
            {.size_bytes = static_cast<uint64_t>(save.units * static_cast<double>(unit_bytes))});
      }
      step.operators.push_back(static_cast<uint32_t>(by));
      compute_us.push_back(save.compute_us * units_of_4_mib);
    }
  }
  for (size_t i = step.accesses.size(); i-- > 0;) {
    step.accesses.push_back(step.accesses[i]);
    step.operators.push_back(static_cast<uint32_t>(2 * by + 1 - step.operators[i]));
    compute_us.push_back(2 * compute_us[i]);
  }
  compute_us.push_back(0);
  for (const double us : compute_us) {
    step.intervals.push_back({.compute_us = us,
                              .other_bytes = 16 * unit_bytes,
                              .transient_bytes = us > 0 ? unit_bytes : 0});
  }
  return step;
}

}  // namespace pinion
