#include "pinion/engine/plan/step_bound.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/link_rates.h"
#include "pinion/engine/plan/step_lives.h"

namespace pinion {
namespace {

// A stretch as the copies of one direction see it.
struct Need {
  double compute_us = 0;
  double fixed_bytes = 0;  // on the device in any case
  double idle_bytes = 0;   // of objects that may be away
  double begun_bytes = 0;  // of objects that may have begun to leave before its end
};

// The needs of a step in the order in which one direction meets them.
struct Needs {
  std::vector<Need> stretches;
  double in_the_end_bytes = 0;  // that have to be away behind the last one
};

// Both have the order of the step.
struct BothWays {
  Needs out;
  Needs in;
};

BothWays NeedsOf(const StepRecord& step) {
  BothWays needs;
  for (const StepStretch& stretch : step.stretches) {
    needs.out.stretches.push_back({.compute_us = stretch.compute_us,
                                   .fixed_bytes = static_cast<double>(stretch.peak_other_bytes())});
  }
  needs.in = needs.out;
  const std::vector<ObjectLife> lives = LivesOf(step);
  const size_t end = step.stretches.size();
  for (size_t index = 0; index < lives.size(); ++index) {
    const StepObject& object = step.objects[index];
    const ObjectLife& life = lives[index];
    // What dropping does not free is among the other bytes.
    if (!object.frees) continue;
    const double size = static_cast<double>(object.size_bytes);
    const bool from_host = object.origin == StepObject::Origin::kHost;
    const bool written_back = from_host && !object.clean;
    const size_t out_end = written_back ? end : life.over + 1;
    const size_t in_begin = from_host ? 0 : life.made;
    if (written_back) needs.out.in_the_end_bytes += size;
    if (from_host) needs.in.in_the_end_bytes += size;
    for (const size_t stretch : life.in_use) {
      needs.out.stretches[stretch].fixed_bytes += size;
      needs.in.stretches[stretch].fixed_bytes += size;
    }
    // It may come and go as it likes.
    if (object.recompute_us.has_value()) continue;
    auto in_use = life.in_use.begin();
    for (size_t i = in_begin; i < out_end; ++i) {
      const bool used = in_use != life.in_use.end() && *in_use == i;
      if (used) ++in_use;
      // It is in use both where it is made and where it is read last.
      if (!object.clean && i > life.made) {
        if (!used) needs.out.stretches[i].idle_bytes += size;
        needs.out.stretches[i].begun_bytes += size;
      }
      if (life.is_read && i < life.over) {
        if (!used) needs.in.stretches[i].idle_bytes += size;
        needs.in.stretches[i].begun_bytes += size;
      }
    }
  }
  return needs;
}

struct Waits {
  std::vector<double> before_us;  // each stretch, all waits together
  double total_us = 0;            // with what is waited for in the end
  double moved_bytes = 0;         // the least that moves
  bool fits = true;
};

// Bytes of several objects are told apart only by how many may be away: that errs towards less
// waiting where an object ends that has left in vain.
Waits WaitsFor(const Needs& needs, double memory_bytes, double bytes_per_us) {
  Waits waits;
  double gone_bytes = 0;   // that have left, of objects which live
  double asked_bytes = 0;  // the same if they leave only when room is needed
  for (const Need& need : needs.stretches) {
    if (need.fixed_bytes > memory_bytes) {
      waits.fits = false;
      return waits;
    }
    asked_bytes = std::min(asked_bytes, need.begun_bytes);
    const double must_be_away = std::max(0.0, need.fixed_bytes + need.idle_bytes - memory_bytes);
    if (must_be_away > gone_bytes) {
      waits.total_us += (must_be_away - gone_bytes) / bytes_per_us;
      gone_bytes = must_be_away;
    }
    if (must_be_away > asked_bytes) {
      waits.moved_bytes += must_be_away - asked_bytes;
      asked_bytes = must_be_away;
    }
    gone_bytes = std::min(need.begun_bytes, gone_bytes + need.compute_us * bytes_per_us);
    waits.before_us.push_back(waits.total_us);
  }
  waits.total_us += std::max(0.0, needs.in_the_end_bytes - gone_bytes) / bytes_per_us;
  waits.moved_bytes += std::max(0.0, needs.in_the_end_bytes - asked_bytes);
  return waits;
}

}  // namespace

absl::StatusOr<double> StepLowerBoundUs(const StepRecord& step, uint64_t memory_bytes,
                                        const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(step.Validate());
  PINION_ASSIGN_OR_RETURN(const LinkRates rates, RatesOf(link));
  BothWays needs = NeedsOf(step);
  std::reverse(needs.in.stretches.begin(), needs.in.stretches.end());
  const double memory = static_cast<double>(memory_bytes);
  const Waits out = WaitsFor(needs.out, memory, rates.out);
  const Waits in = WaitsFor(needs.in, memory, rates.in);
  if (!out.fits || !in.fits) return std::numeric_limits<double>::infinity();
  double waits_us = std::max(out.total_us, in.total_us);
  // What is waited for before a stretch, and behind it.
  for (size_t i = 0; i < step.stretches.size(); ++i) {
    waits_us = std::max(waits_us, out.before_us[i] + in.before_us[step.stretches.size() - 1 - i]);
  }
  return std::max(step.compute_us() + waits_us, LinkUs(out.moved_bytes, in.moved_bytes, rates));
}

}  // namespace pinion
