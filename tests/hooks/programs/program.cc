#include "pinion/tests/hooks/programs/program.h"

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace pinion::testing {
namespace {

constexpr std::array<absl::string_view, kOpKinds> kNames = {"add",
                                                            "mul",
                                                            "sin",
                                                            "gelu",
                                                            "relu",
                                                            "softmax",
                                                            "linear",
                                                            "attention",
                                                            "conv",
                                                            "layer_norm",
                                                            "group_norm",
                                                            "batch_norm",
                                                            "transposed",
                                                            "slice",
                                                            "reshape",
                                                            "expand",
                                                            "broadcast",
                                                            "as_strided",
                                                            "in_place",
                                                            "in_place_view",
                                                            "dropout",
                                                            "rrelu",
                                                            "mask",
                                                            "noise",
                                                            "where",
                                                            "gather",
                                                            "cast",
                                                            "detach",
                                                            "custom",
                                                            "no_offload",
                                                            "checkpoint",
                                                            "planned_checkpoint",
                                                            "whole_checkpoint",
                                                            "recurrent",
                                                            "hook"};

constexpr Setting kSettings[] = {
    {"seed", &Program::seed},
    {"schedule", &Program::schedule},
    {"reuse", &Program::reuse},
    {"steps", &Program::steps},
    {"rows", &Program::rows},
    {"width", &Program::width},
    {"micro_batches", &Program::micro_batches},
    {"forwards", &Program::forwards},
    {"newest_first", &Program::newest_first},
    {"backwards", &Program::backwards},
    {"create_graph", &Program::create_graph},
    {"optimizer", &Program::optimizer},
    {"zero_gradients_stay", &Program::zero_gradients_stay},
    {"module_zero_grad", &Program::module_zero_grad},
    {"short_gradients", &Program::short_gradients},
    {"frozen", &Program::frozen},
    {"thaws", &Program::thaws},
    {"late_hooks", &Program::late_hooks},
    {"swaps_weights", &Program::swaps_weights},
    {"autocast", &Program::autocast},
    {"normalises_input", &Program::normalises_input},
    {"input_requires_grad", &Program::input_requires_grad},
    {"holds_results", &Program::holds_results},
    {"loss_behind", &Program::loss_behind},
    {"odd_steps_are_short", &Program::odd_steps_are_short},
    {"odd_steps_skip", &Program::odd_steps_skip},
    {"odd_steps_measure", &Program::odd_steps_measure},
    {"odd_steps_longer", &Program::odd_steps_longer},
    {"other_model", &Program::other_model},
    {"engine", &Program::engine},
    {"session", &Program::session},
    {"streams_weights", &Program::streams_weights},
    {"gradients_stay", &Program::gradients_stay},
    {"late_parameter", &Program::late_parameter},
    {"scope_has_module", &Program::scope_has_module},
    {"scopes_end", &Program::scopes_end},
    {"slow_backing", &Program::slow_backing},
    {"window_kib", &Program::window_kib},
    {"window_tensors", &Program::window_tensors},
    {"blocking", &Program::blocking},
    {"verify", &Program::verify},
    {"offload_leaves", &Program::offload_leaves},
    {"copies_casts", &Program::copies_casts},
    {"min_bytes", &Program::min_bytes},
    {"target", &Program::target},
    {"target_percent", &Program::target_percent},
    {"prefetch_kib", &Program::prefetch_kib},
    {"other_session", &Program::other_session},
    {"heads", &Program::heads},
    {"measured_link", &Program::measured_link},
    {"chunk_kib", &Program::chunk_kib},
    {"traces", &Program::traces},
    {"weight_window", &Program::weight_window},
    {"forgets_generators", &Program::forgets_generators},
    {"unchecked_segments", &Program::unchecked_segments},
    {"guarded_segments", &Program::guarded_segments},
    {"segment_kib", &Program::segment_kib},
    {"host_kib", &Program::host_kib},
    {"host_is_full", &Program::host_is_full},
    {"pageable", &Program::pageable},
    {"host_wait_ms", &Program::host_wait_ms},
};

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}
  int Below(int end) { return static_cast<int>(random_() % static_cast<uint64_t>(end)); }
  int OneIn(int n) { return Below(n) == 0 ? 1 : 0; }
  int Among(const std::vector<int>& values) {
    return values[static_cast<size_t>(Below(static_cast<int>(values.size())))];
  }

 private:
  std::mt19937_64 random_;
};

// Draws rare idioms, which are most frequent with streamed weights.
void DrawIdioms(Draws& draws, Program& program) {
  const bool streams = program.streams_weights != 0;
  const auto one_in = [&](int n) { return draws.OneIn(streams ? n : 3 * n); };
  program.module_zero_grad = draws.OneIn(4);
  if (one_in(4)) program.frozen = 1 + draws.Below(5);
  if (program.frozen != 0) program.thaws = draws.Below(3);
  program.short_gradients = one_in(5);
  if (program.create_graph == 0 && one_in(6)) {
    program.create_graph = 3;
    program.micro_batches = program.forwards = program.backwards = 1;
  }
  if (program.create_graph != 3 && one_in(4)) program.late_hooks = 1 + draws.Below(3);
  program.gradients_stay = draws.Below(2);
  program.late_parameter = draws.OneIn(4);
  if (draws.OneIn(6)) program.engine = 1 + draws.Below(2);
  if (draws.OneIn(8)) program.scope_has_module = 2;
  if (draws.OneIn(8)) program.scopes_end = 1 + draws.Below(2);
  program.slow_backing = draws.OneIn(12);
  for (int i = one_in(3) * 3; i > 0; --i) {
    program.ops[static_cast<size_t>(draws.Below(static_cast<int>(program.ops.size())))].kind =
        OpKind::kRecurrent;
  }
  // Saved again, or cast again, it has its new bytes; what counts as a leaf that is no parameter
  // has its old ones (docs/users/limits.md).
  const bool saves_once = program.autocast == 0 && program.scope_has_module != 2 &&
                          program.frozen == 0 &&
                          std::none_of(program.ops.begin(), program.ops.end(),
                                       [](const Op& op) { return IsCheckpoint(op.kind); });
  if (saves_once && !streams) program.swaps_weights = draws.OneIn(4);
  // A plan made for another kind of backward seldom causes a difference.
  const bool may_alternate = program.target == 2 && program.create_graph == 0 && !streams;
  if (may_alternate && draws.OneIn(4)) program.create_graph = 2;
}

// These settings have a random stream of their own, so that they change no other setting of a seed.
void DrawOptions(Draws& draws, Program& program) {
  program.prefetch_kib = draws.OneIn(3) ? draws.Among({1, 64, 1024}) : 0;
  if (program.target != 2 && draws.OneIn(4)) program.other_session = 1 + draws.Below(3);
  if (draws.OneIn(8)) program.heads = 1 + draws.Below(3);
  if (draws.OneIn(12)) program.measured_link = 1 + draws.Below(2);
  if (draws.OneIn(8)) program.chunk_kib = draws.Among({1, 4, 16});
  if (draws.OneIn(12)) program.traces = 1 + draws.Below(2);
  if (draws.OneIn(2)) program.weight_window = 1 + draws.Below(8);
  program.forgets_generators = draws.OneIn(4);
  program.unchecked_segments = draws.OneIn(6);
  if (draws.OneIn(8)) program.segment_kib = draws.Among({4, 64, 256});
  if (program.streams_weights != 0 || program.slow_backing != 0 || !draws.OneIn(8)) return;
  if (draws.OneIn(2)) {
    program.host_is_full = 1 + draws.Below(2);
  } else {
    program.host_kib = draws.Among({4, 16, 64, 256});
    program.pageable = draws.OneIn(4);
  }
  program.host_wait_ms = draws.OneIn(4);
}

// Draws steps that recur rarely. Drawn last, they change two other settings of a seed: `steps`, and
// with odd steps `target_percent`.
void DrawOddSteps(Draws& draws, Program& program) {
  constexpr int kStepsIfOdd = 3 * kOddStepPeriod;  // each kind of odd step recurs twice
  constexpr int kManySteps = 24;
  // They matter most where a target can be exceeded.
  const int one_in = program.target == 2 ? 3 : 24;
  if (draws.OneIn(one_in)) program.odd_steps_measure = draws.Among({1, 2, 3, 3, 4, 4});
  if (draws.OneIn(one_in)) program.odd_steps_longer = 1 + draws.Below(8);
  const bool has_host_limits = program.host_is_full != 0 || program.host_kib != 0;
  // Without a session nobody makes idle weights give way (docs/users/limits.md).
  const bool may_have_other = program.session != 0 && !has_host_limits;
  if (draws.OneIn(one_in) && may_have_other) program.other_model = 1 + draws.Below(2);
  if (program.IsOdd(kOddStepPeriod - 1)) {
    program.steps = kStepsIfOdd;
    // Most targets that odd steps exceed are the least ones.
    if (draws.OneIn(2)) program.target_percent = 0;
  }
  if (draws.OneIn(10)) program.steps = kManySteps;
}

// "r2" and "2" are 2.
bool ReadNumber(absl::string_view word, int* number) {
  if (!word.empty() && word.front() == 'r') word.remove_prefix(1);
  return absl::SimpleAtoi(word, number);
}

}  // namespace

absl::string_view NameOf(OpKind kind) { return kNames[static_cast<size_t>(kind)]; }

absl::Span<const Setting> Settings() { return kSettings; }

Program Program::Draw(uint64_t seed) {
  Draws draws(seed);
  Program program;
  program.seed = static_cast<int>(seed);
  program.schedule = draws.Below(3);
  program.reuse = draws.Below(2);

  program.steps = 4 + draws.Below(4);
  program.rows = draws.Among({16, 32, 48});
  program.width = draws.Among({64, 96, 160});
  program.micro_batches = draws.OneIn(4) ? 2 + draws.Below(2) : 1;
  program.forwards = 1 + draws.OneIn(5);
  program.newest_first = draws.Below(2);
  program.backwards = 1 + draws.OneIn(6);
  program.create_graph = draws.OneIn(6) ? 1 + draws.Below(2) : 0;
  program.optimizer = draws.Below(3);
  program.zero_gradients_stay = draws.OneIn(5);
  program.autocast = draws.OneIn(8);
  program.normalises_input = draws.OneIn(4);
  program.input_requires_grad = draws.OneIn(6);
  program.holds_results = draws.OneIn(6);
  program.odd_steps_are_short = draws.OneIn(6);
  program.odd_steps_skip = draws.OneIn(6) ? 1 + draws.Below(10) : 0;

  program.session = 1;
  program.scope_has_module = draws.Below(2);
  program.streams_weights = program.create_graph ? 0 : draws.OneIn(8);
  program.offload_leaves = draws.OneIn(4);
  program.verify = draws.OneIn(8);
  program.copies_casts = draws.OneIn(4);
  program.min_bytes = draws.Among({1, 1, 1, 2048, 8192});
  switch (draws.Below(6)) {
    case 0:
      program.blocking = 1;
      break;
    case 1:
      program.window_kib = draws.Among({1, 4, 16, 64});
      break;
    case 2:
      program.window_tensors = draws.Among({1, 2, 5});
      break;
    case 3:
      program.target = 1;
      break;
    default:
      program.target = 2;
      program.target_percent = draws.Among({0, 0, draws.Below(100), draws.Below(100), 100});
  }

  const int ops = 10 + draws.Below(51);
  // Half of the programs have checkpoints.
  const int kinds = static_cast<int>(draws.Below(2) ? OpKind::kRecurrent : OpKind::kCheckpoint);
  for (int i = 0; i < ops; ++i) {
    program.ops.push_back({.kind = static_cast<OpKind>(draws.Below(kinds)),
                           .out = draws.Below(kRegisters),
                           .in = draws.Below(kRegisters),
                           .other = draws.Below(kRegisters),
                           .extra = draws.Below(8)});
  }
  program.loss_behind = draws.OneIn(4);
  DrawIdioms(draws, program);
  Draws option_draws(~seed);
  DrawOptions(option_draws, program);
  program.guarded_segments = option_draws.OneIn(3);
  for (int i = option_draws.OneIn(4) * 2; i > 0; --i) {
    program.ops[static_cast<size_t>(option_draws.Below(ops))].kind = OpKind::kHook;
  }
  DrawOddSteps(option_draws, program);
  return program;
}

bool Program::IsOdd(int step) const {
  const bool is_longer = odd_steps_longer != 0 && step % kOddStepPeriod != 0;
  return is_longer || (IsFourth(step) && (odd_steps_measure != 0 || other_model != 0));
}

std::string Program::ToString(absl::string_view separator) const {
  std::vector<std::string> lines;
  for (const Setting& setting : kSettings) {
    const int value = this->*setting.value;
    if (value != Program().*setting.value) lines.push_back(absl::StrCat(setting.name, " ", value));
  }
  for (const Op& op : ops) {
    lines.push_back(absl::StrCat("r", op.out, " = ", NameOf(op.kind), "(r", op.in, ", r", op.other,
                                 ", ", op.extra, ")"));
  }
  return absl::StrJoin(lines, separator);
}

absl::Status Program::Add(absl::string_view text) {
  for (const absl::string_view line : absl::StrSplit(text, absl::ByAnyChar(";\n"))) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" =(),"), absl::SkipEmpty());
    if (words.empty()) continue;
    const auto setting = std::find_if(std::begin(kSettings), std::end(kSettings),
                                      [&](const Setting& known) { return known.name == words[0]; });
    if (setting != std::end(kSettings) && words.size() == 2 &&
        ReadNumber(words[1], &(this->*setting->value))) {
      continue;
    }
    Op op;
    const auto name = std::find(kNames.begin(), kNames.end(), words.size() == 5 ? words[1] : "");
    if (name == kNames.end() || !ReadNumber(words[0], &op.out) || !ReadNumber(words[2], &op.in) ||
        !ReadNumber(words[3], &op.other) || !ReadNumber(words[4], &op.extra)) {
      return absl::InvalidArgumentError(absl::StrCat("cannot read \"", line, "\""));
    }
    op.kind = static_cast<OpKind>(name - kNames.begin());
    for (int* const number : {&op.out, &op.in, &op.other}) *number &= kRegisters - 1;
    ops.push_back(op);
  }
  return absl::OkStatus();
}

}  // namespace pinion::testing
