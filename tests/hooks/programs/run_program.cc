#include "pinion/tests/hooks/programs/run_program.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/programs/program_options.h"
#include "pinion/tests/hooks/programs/training.h"
#include "pinion/tests/hooks/support/cpu_kernels.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using at::Tensor;

using Sessions = std::vector<std::shared_ptr<OffloadSession>>;

constexpr uint64_t kMemoryBytes = 256 * kMiB;

struct Run {
  std::vector<Result> results;
  uint64_t peak_bytes = 0;
  uint64_t steps_over_target = 0;  // without those that may, as the first odd one of a kind
  uint64_t most_bytes_over_target = 0;
  uint64_t refusals = 0;
  bool is_before_first_save = false;  // of the micro-batch that failed
  Verdict failure;                    // but for bits
};

// Returns the largest least target that a session has named because it could not meet its own. 0:
// the log has none.
uint64_t LeastNamedIn(const std::string& log) {
  constexpr absl::string_view kBefore = "least is ";
  uint64_t most_bytes = 0;
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    if (!absl::StrContains(line, "memory_target_bytes cannot be met")) continue;
    const size_t at = line.rfind(kBefore);
    PINION_CHECK(at != absl::string_view::npos) << line;
    most_bytes =
        std::max<uint64_t>(most_bytes, std::stoull(std::string(line.substr(at + kBefore.size()))));
  }
  return most_bytes;
}

// Returns the first line; later lines list the owners of device memory.
std::string MessageOf(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

std::shared_ptr<EmulatedMachine> NewMachine(const Program& program) {
  EmulatedOptions options;
  options.memory_bytes = kMemoryBytes;
  options.schedule = static_cast<EffectSchedule>(program.schedule);
  options.reuse = static_cast<ReuseMode>(program.reuse);
  options.seed = static_cast<uint64_t>(program.seed);
  options.abort_on_race = false;
  auto machine = EmulatedMachine::Create(options).value();
  absl::Status registered;
  PINION_CHECK(Soon([&] {
    registered = RegisterEmuDevice(machine);
    return registered.ok();
  })) << registered;
  return machine;
}

// Empty once nothing of a program is on the device, in host memory or in the session: autograd's
// workers may free their last references a moment after backward has returned.
std::string WhatIsLeft(EmulatedMachine& machine, const Sessions& sessions) {
  const auto look = [&]() -> std::string {
    for (const auto& session : sessions) {
      const uint64_t handles = session->GetStats().live_handles;
      if (handles > 0) return absl::StrCat(handles, " handles");
    }
    PINION_CHECK(machine.SynchronizeDevice(0).ok());
    for (const auto& session : sessions) {
      const uint64_t bytes = session->GetAllocatorStats().booked_bytes.current;
      if (bytes > 0) return absl::StrCat(bytes, " host bytes");
    }
    if (machine.memory_stats(0).in_use_bytes == 0) return "";
    return absl::StrCat(machine.memory_stats(0).in_use_bytes, " device bytes:\n",
                        machine.MemoryReport(0));
  };
  std::string left;
  Soon([&] { return (left = look()).empty(); });
  return left;
}

Run RunIn(const Program& program, const Mode& mode) {
  Run run;
  const auto machine = NewMachine(program);
  Sessions sessions;
  std::unique_ptr<Training> training;
  const auto failed = [&](FailureKind kind, const std::exception& error) {
    const std::string place = training == nullptr ? "before the first step" : training->place();
    run.failure = {kind, absl::StrCat(MessageOf(error), " (", place, ")")};
    run.is_before_first_save = training != nullptr && training->IsBeforeFirstSave();
  };
  try {
    training = std::make_unique<Training>(program, mode, machine);
    sessions = training->sessions();
    PINION_CHECK(machine->SynchronizeDevice(0).ok());
    machine->ResetPeakMemory(0);
    if (mode.limit_bytes.has_value()) {
      PINION_CHECK(machine->SetMemoryLimit(0, *mode.limit_bytes).ok());
    }
    run.results = training->Train();
  } catch (const c10::OutOfMemoryError& error) {
    failed(FailureKind::kOutOfMemory, error);
  } catch (const std::exception& error) {
    failed(FailureKind::kError, error);
  }
  const uint64_t excused_steps = training == nullptr ? 0 : training->excused_steps_over_target();
  training.reset();
  for (const auto& session : sessions) {
    const OffloadStats stats = session->GetStats();
    run.steps_over_target += stats.steps_over_target;
    run.most_bytes_over_target = std::max(run.most_bytes_over_target, stats.most_bytes_over_target);
    run.refusals += stats.kept_no_host_memory;
    // Of a module without parameters.
    if (program.scope_has_module == 2 && stats.kept_parameter > 0) {
      run.failure = {FailureKind::kError, "what is no parameter of the scope's module was one"};
    }
  }
  run.steps_over_target -= excused_steps;
  run.peak_bytes = machine->memory_stats(0).peak_bytes;
  const std::string left = WhatIsLeft(*machine, sessions);
  if (!left.empty()) machine->BreakDevice(0, "a program has left something on it");
  if (!machine->races().empty()) {
    run.failure = {FailureKind::kRace, machine->races().front()};
  } else if (run.failure.kind == FailureKind::kNone && !left.empty()) {
    run.failure = {FailureKind::kLeft, left};
  }
  return run;
}

Verdict Compare(const Run& plain, const Run& offloaded) {
  if (offloaded.failure.kind != FailureKind::kNone) return offloaded.failure;
  if (plain.results.size() != offloaded.results.size()) {
    return {FailureKind::kBits, "another number of results"};
  }
  for (size_t i = 0; i < plain.results.size(); ++i) {
    const Result& expected = plain.results[i];
    const Tensor& actual = offloaded.results[i].value;
    if (expected.value.defined() != actual.defined() ||
        (actual.defined() && !SameBytes(expected.value, actual))) {
      return {FailureKind::kBits, absl::StrCat(expected.name, " differs")};
    }
  }
  return {FailureKind::kNone, "", offloaded.refusals};
}

// Returns by how much the program may exceed its target, if that is counted. Its steps do what no
// earlier record shows (docs/users/limits.md).
uint64_t MostBeyond(const Program& program, uint64_t target_bytes) {
  uint64_t bytes = 0;
  if (program.odd_steps_skip != 0) bytes += std::max(target_bytes / 12, 16 * kKiB);
  // A matrix's first gradient and the one added to it; or a hook's gradient on the device.
  const bool has_new_hooks = program.streams_weights != 0 && program.late_hooks > 1;
  const auto width = static_cast<uint64_t>(program.width);
  if (program.thaws != 0 || has_new_hooks) bytes += 2 * width * width * sizeof(float);
  return bytes;
}

}  // namespace

std::string Verdict::ToString() const {
  constexpr const char* kNames[] = {"passes",      "wrong bits",        "out of memory", "an error",
                                    "a data race", "something is left", "not a program"};
  return absl::StrCat(kNames[static_cast<int>(kind)], what.empty() ? "" : ": ", what);
}

Verdict RunProgram(const Program& program) {
  at::set_num_threads(1);
  ChooseCpuKernels();
  std::optional<CapturedLog> quiet;
  // Each such end is an error there, and a link that cannot be measured a warning.
  const bool is_quiet = program.scopes_end != 0 || program.measured_link != 0 ||
                        program.host_is_full != 0 || program.host_kib != 0;
  if (is_quiet) quiet.emplace();
  const Run plain = RunIn(program, {});
  if (plain.failure.kind != FailureKind::kNone) {
    return {FailureKind::kInvalid, plain.failure.ToString()};
  }
  Mode mode = {.offload = true};
  if (program.target != 2) return Compare(plain, RunIn(program, mode));
  mode.target_bytes = kLeastTarget;
  quiet.emplace();  // the least target cannot be met
  const Run least = RunIn(program, mode);
  if (!is_quiet) quiet.reset();
  if (const Verdict verdict = Compare(plain, least); verdict.kind != FailureKind::kNone) {
    return {verdict.kind, absl::StrCat("with the least memory: ", verdict.what)};
  }
  const uint64_t most_bytes = std::max(least.peak_bytes, plain.peak_bytes);
  const uint64_t part_bytes =
      (most_bytes - least.peak_bytes) * static_cast<uint64_t>(program.target_percent) / 100;
  mode.target_bytes =
      least.peak_bytes + part_bytes / kAllocationGranularityBytes * kAllocationGranularityBytes;
  const uint64_t target_bytes = *mode.target_bytes;
  Run run;
  Verdict verdict;
  const bool has_weights = program.streams_weights != 0 || program.other_model != 0;
  // Another least is named where a later step needs more.
  for (bool is_too_small = true, has_idle_weights = false; is_too_small || has_idle_weights;) {
    const CapturedLog log;
    mode.limit_bytes = mode.target_bytes;
    run = RunIn(program, mode);
    verdict = Compare(plain, run);
    const uint64_t named_bytes = LeastNamedIn(log.text());
    is_too_small = verdict.kind == FailureKind::kOutOfMemory && named_bytes > *mode.target_bytes;
    if (is_too_small) mode.target_bytes = named_bytes;
    // Streamed weights of the step before keep their room until a tensor is saved
    // (docs/users/limits.md). The rest of the program has to keep to the target.
    has_idle_weights = !is_too_small && verdict.kind == FailureKind::kOutOfMemory && has_weights &&
                       run.is_before_first_save && run.refusals == 0 &&
                       !std::exchange(mode.limits_from_first_save, true);
    // Checksums come on top. Metrics between forward and backward count as never freed
    // (docs/users/limits.md).
    const bool may_name_more =
        program.verify != 0 || program.MeasuresAfterForward(kOddStepPeriod - 1);
    if (is_too_small && !may_name_more && named_bytes > most_bytes) {
      return {FailureKind::kError, absl::StrCat("the least that is named, ", named_bytes,
                                                ", is more than all of it: ", most_bytes)};
    }
  }
  verdict.has_limit_from_first_save = mode.limits_from_first_save;
  if (verdict.kind == FailureKind::kNone && mode.limits_from_first_save) {
    verdict.what = "ran out of memory before it saved a tensor, and kept to the target from there";
    return verdict;
  }
  if (verdict.kind == FailureKind::kNone && run.steps_over_target > 0) {
    return {FailureKind::kError, "a step counts as over a target that the device never exceeds"};
  }
  if (verdict.kind != FailureKind::kOutOfMemory) {
    if (verdict.kind == FailureKind::kNone && *mode.target_bytes != target_bytes) {
      verdict.what = absl::StrCat("the target ", target_bytes, " was too small, and the log named ",
                                  *mode.target_bytes);
    }
    return verdict;
  }
  if (run.refusals > 0) {  // the tensors that stay may not fit the target
    mode.limit_bytes = std::nullopt;
    return Compare(plain, RunIn(program, mode));
  }
  verdict.what = absl::StrCat("target ", *mode.target_bytes, " of ", least.peak_bytes, " to ",
                              plain.peak_bytes, ": ", verdict.what);
  const uint64_t more_bytes = MostBeyond(program, *mode.target_bytes);
  if (more_bytes == 0) return verdict;
  mode.limit_bytes = *mode.target_bytes + more_bytes;
  const Run with_room = RunIn(program, mode);
  if (with_room.steps_over_target == 0) return verdict;
  const Verdict verdict_with_room = Compare(plain, with_room);
  if (verdict_with_room.kind != FailureKind::kNone) return verdict_with_room;
  verdict.kind = FailureKind::kNone;
  absl::StrAppend(&verdict.what, "; ", with_room.most_bytes_over_target, " more");
  return verdict;
}

}  // namespace pinion::testing
