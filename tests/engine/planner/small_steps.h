// Steps and links whose times can be added up by hand.

#ifndef PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_
#define PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion::testing {

// 1 GB/s in each direction, which is 1000 bytes per microsecond, and `duplex_gb_per_s` while both
// directions are busy.
inline LinkCalibration RoundLink(double duplex_gb_per_s = 1, double fixed_us = 0) {
  LinkCalibration link;
  link.d2h = {.fixed_us = fixed_us, .gb_per_s = 1};
  link.h2d = {.fixed_us = fixed_us, .gb_per_s = 1};
  link.d2h_duplex_gb_per_s = duplex_gb_per_s;
  link.h2d_duplex_gb_per_s = duplex_gb_per_s;
  return link;
}

// One forward that makes these objects, and its backward, which reads them in reverse; 10 us of
// compute each time.
inline StepTrace ForwardAndBackward(const std::vector<StepObject>& objects) {
  StepTrace step;
  step.objects = objects;
  for (uint32_t i = 0; i < objects.size(); ++i) step.accesses.push_back(i);
  for (size_t i = objects.size(); i-- > 0;) step.accesses.push_back(static_cast<uint32_t>(i));
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 10});
  return step;
}

// Of one size, with these signatures.
inline StepTrace ForwardAndBackward(uint64_t size_bytes, const std::vector<uint64_t>& signatures) {
  std::vector<StepObject> objects;
  for (const uint64_t signature : signatures) {
    objects.push_back({.size_bytes = size_bytes, .signature = signature});
  }
  return ForwardAndBackward(objects);
}

// One forward of blocks, each of which saves its input and then something within a segment, and its
// backward.
inline StepTrace Blocks(const std::vector<std::vector<uint64_t>>& sizes) {
  StepTrace step;
  for (const std::vector<uint64_t>& block : sizes) {
    StepSegment& segment = step.segments.emplace_back();
    segment.before = {.other_bytes = 100};
    for (size_t i = 0; i < block.size(); ++i) {
      const auto access = static_cast<uint32_t>(step.accesses.size());
      step.objects.push_back({.size_bytes = block[i]});
      step.accesses.push_back(access);
      if (i == 0) segment.inputs.push_back(access);
      if (i > 0) segment.accesses.push_back(access);
    }
  }
  for (size_t block = sizes.size(); block-- > 0;) {
    StepSegment& segment = step.segments[block];
    const std::vector<uint32_t> inner = segment.accesses;
    for (size_t i = inner.size(); i-- > 0;) {
      segment.accesses.push_back(static_cast<uint32_t>(step.accesses.size()));
      step.accesses.push_back(inner[i]);
    }
    // The block's first operator has saved the input, too.
    step.accesses.push_back(segment.inputs.front());
  }
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 10, .other_bytes = 100});
  return step;
}

// Blocks that are one segment each. Inside it, each object that the block saves beside its input is
// a segment of its own, which needs the block's input.
inline StepTrace BlocksOfParts(const std::vector<std::vector<uint64_t>>& sizes) {
  StepTrace step = Blocks(sizes);
  std::vector<StepSegment> nested;
  for (const StepSegment& block : step.segments) {
    const auto outer = static_cast<uint32_t>(nested.size());
    nested.push_back(block);
    for (size_t i = 0; i < block.accesses.size() / 2; ++i) {
      StepSegment& part = nested.emplace_back(block);
      part.accesses = {block.accesses[i], block.accesses[block.accesses.size() - 1 - i]};
      part.outer = outer;
    }
  }
  step.segments = std::move(nested);
  return step;
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_
