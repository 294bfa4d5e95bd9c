#include "pinion/tests/hooks/programs/program_options.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <cstddef>
#include <utility>

#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/tests/engine/tier/slow_backing.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/support/recording_trace_sink.h"

namespace pinion::testing {
namespace {

uint64_t KibOf(int setting) { return static_cast<uint64_t>(setting) * kKiB; }

void SetHostOptions(const Program& program, AllocatorOptions& options) {
  if (program.segment_kib != 0) options.segment_bytes = KibOf(program.segment_kib);
  if (!HasHostLimits(program)) return;
  if (program.host_kib != 0) options.max_locked_bytes = KibOf(program.host_kib);
  options.pageable_fallback = program.pageable != 0;
  options.max_wait_for_deferred = absl::Milliseconds(program.host_wait_ms);
  if (program.host_is_full != 0) {
    options.warn_percent = 60;
    options.high_percent = 90;
    options.low_percent = 85;
  }
}

}  // namespace

bool HasHostLimits(const Program& program) {
  return program.streams_weights == 0 && program.other_model == 0 && program.slow_backing == 0;
}

OffloadOptions OptionsOf(const Program& program, const Mode& mode,
                         const std::shared_ptr<EmulatedMachine>& machine) {
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.min_offload_bytes = static_cast<uint64_t>(program.min_bytes);
  options.offload_leaves = program.offload_leaves != 0;
  options.verify = program.verify != 0;
  options.cast_weights_again = program.copies_casts == 0;
  if (program.slow_backing != 0) options.backing = std::make_shared<SlowBacking>(*machine);
  // A target takes the place of windows, of which one in tensors takes the place of one in bytes.
  if (mode.target_bytes.has_value()) {
    options.memory_target_bytes = *mode.target_bytes;
  } else if (program.target == 1) {
    options.memory_target_bytes = OffloadOptions::kAutoTarget;
  } else if (program.blocking != 0) {
    options.overlap = false;
  } else if (program.window_tensors != 0) {
    options.eviction_window_tensors = static_cast<uint64_t>(program.window_tensors);
  } else if (program.window_kib != 0) {
    options.eviction_window_bytes = KibOf(program.window_kib);
    options.prefetch_window_bytes = options.eviction_window_bytes;
  }
  if (program.prefetch_kib != 0 && options.memory_target_bytes == OffloadOptions::kNoTarget) {
    options.prefetch_window_bytes = KibOf(program.prefetch_kib);
  }
  if (program.measured_link != 0) options.link = std::nullopt;
  if (program.chunk_kib != 0) options.engine.max_chunk_bytes = KibOf(program.chunk_kib);
  if (program.traces == 1) options.engine.trace = std::make_shared<RecordingTraceSink>();
  options.engine.time_transfers = program.traces == 2;
  SetHostOptions(program, options.allocator);
  return options;
}

OffloadOptions OtherOptionsOf(const Program& program, OffloadOptions options) {
  options.memory_target_bytes = OffloadOptions::kNoTarget;
  options.overlap = true;
  options.eviction_window_bytes = OffloadOptions::kAutoWindow;
  options.eviction_window_tensors = OffloadOptions::kNoTensorWindow;
  options.prefetch_window_bytes = OffloadOptions::kAutoWindow;
  if (program.other_session == 3) {
    options.eviction_window_tensors = 1;
  } else {
    options.eviction_window_bytes = program.other_session == 1 ? 1 : kMiB;
    options.prefetch_window_bytes = program.other_session == 1 ? kMiB : 1;
  }
  return options;
}

ModuleHeads HeadsOf(const Program& program, const std::vector<at::Tensor>& parameters) {
  if (program.heads == 0) return {};
  torch::nn::Module model;
  const auto add = [&](const char* name, size_t begin, size_t end) {
    torch::nn::ParameterList part;
    for (size_t i = begin; i < end; ++i) part->append(parameters[i]);
    model.register_module(name, std::move(part));
  };
  if (program.heads != 2) add("lm_head", 0, 1);
  if (program.heads != 1) add("LigerBlock", 1, parameters.size());
  return FindHeads(model, {.warn_if_no_head = false});
}

WeightOptions WeightOptionsOf(const Program& program, const Mode& mode,
                              const OffloadOptions& offload) {
  WeightOptions options = {.tier = {.allocator = offload.allocator, .engine = offload.engine},
                           .gradients_stay = program.gradients_stay != 0};
  const auto matrix_bytes = static_cast<uint64_t>(program.width * program.width) * sizeof(float);
  if (mode.target_bytes == kLeastTarget) {
    options.window_bytes = matrix_bytes;
  } else if (mode.target_bytes.has_value()) {
    options.memory_target_bytes = *mode.target_bytes;
  } else {
    options.window_bytes = matrix_bytes * static_cast<uint64_t>(program.weight_window);
  }
  return options;
}

}  // namespace pinion::testing
