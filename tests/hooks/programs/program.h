// A random training program as plain data: operators over four registers, and what happens around
// them. Any operator can be removed and any setting can be changed: what is left is a program.
//
//   Program program = Program::Draw(seed);
//   std::cout << program.ToString();       // "optimizer 2; ...; r0 = sin(r1, r2, 5)"
//   status = program.Add("session 1; r0 = rrelu(r0, r0, 0)");

#ifndef PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_H_
#define PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace pinion::testing {

// All operators take and return tensors of one shape (program_net.cc).
enum class OpKind {
  kAdd,
  kMul,
  kSin,
  kGelu,
  kRelu,
  kSoftmax,
  kLinear,
  kAttention,
  kConvolution,
  kLayerNorm,
  kGroupNorm,
  kBatchNorm,
  kTransposed,
  kSlice,
  kReshape,
  kExpand,
  kBroadcast,
  kAsStrided,
  kInPlace,
  kInPlaceView,
  kDropout,
  kRrelu,
  kMask,
  kNoise,
  kWhere,
  kGather,
  kCast,
  kDetach,
  kCustom,
  kNoOffload,
  // The next 1 + extra % 8 operators are a checkpointed segment.
  kCheckpoint,
  kPlannedCheckpoint,
  kWholeCheckpoint,  // early_stop = false
  kRecurrent,
  // A hook on a gradient, which needs temporary memory: `in`'s, or with odd extra a matrix's.
  kHook,
};
inline constexpr int kOpKinds = static_cast<int>(OpKind::kHook) + 1;

constexpr bool IsCheckpoint(OpKind kind) {
  return kind >= OpKind::kCheckpoint && kind <= OpKind::kWholeCheckpoint;
}

absl::string_view NameOf(OpKind kind);

inline constexpr int kRegisters = 4;
inline constexpr int kOddStepPeriod = 4;  // even, so that a period has all kinds of steps

struct Op {
  OpKind kind = OpKind::kAdd;
  int out = 0;  // registers
  int in = 0;
  int other = 0;
  int extra = 0;  // a parameter's number, a variant

  bool operator==(const Op&) const = default;
};

// 0 means no or none; comments name other meanings. Defaults are the simplest values.
struct Program {
  std::vector<Op> ops;

  // The emulated device.
  int seed = 1;  // of the device and of all values
  int schedule = 1;
  int reuse = 0;

  // What a step does.
  int steps = 1;
  int rows = 8;
  int width = 64;  // a multiple of 32
  int micro_batches = 1;
  int forwards = 1;  // in flight at once, of each micro-batch
  int newest_first = 0;
  int backwards = 1;  // of each graph: all but the last retain it
  // 1: a penalty on the gradients, 2: in odd steps, 3: on what is in grad() by then
  int create_graph = 0;
  int optimizer = 0;  // 0: SGD, 1: SGD with momentum, 2: Adam
  int zero_gradients_stay = 0;
  int module_zero_grad = 0;  // in place of the optimizer's
  int short_gradients = 0;   // in bfloat16
  int frozen = 0;            // this parameter, of which 0 is always trained
  int thaws = 0;             // in this step
  int late_hooks = 0;        // on gradients, from this step on, counted from 1
  int swaps_weights = 0;     // between forward and backward, by set_data
  int autocast = 0;          // to bfloat16
  int normalises_input = 0;
  int input_requires_grad = 0;
  int holds_results = 0;        // of forward, until its backward is over
  int loss_behind = 0;          // part of the loss is computed behind the scope
  int odd_steps_are_short = 0;  // half of the rows
  int odd_steps_skip = 0;       // this operator, counted from 1
  // These three vary steps with a period of kOddStepPeriod. The first odd step of each kind may
  // exceed the memory target: the device has no limit in this step. Later odd steps may not.
  //
  // Every fourth step computes metrics without gradients. 1 and 3: after half of the operators, 2
  // and 4: between forward and backward. Temporary memory: four registers (1, 2) or eight (3, 4)
  int odd_steps_measure = 0;
  // Forward repeats this many of its last operators, in turn 0, 1, 2 and 3 times
  int odd_steps_longer = 0;
  // Another model, whose weights are streamed, scores the input without gradients in every fourth
  // step. 1: before forward, 2: between forward and backward
  int other_model = 0;
  int engine = 0;  // 1: past the process's default one, 2: on another thread

  // How it is offloaded.
  int session = 0;
  int streams_weights = 0;
  int gradients_stay = 0;    // until the step's end, where weights are streamed
  int late_parameter = 0;    // which is refused there
  int scope_has_module = 0;  // 2: one without parameters
  int scopes_end = 0;        // 1: two, in the order in which they began, 2: on another thread
  int slow_backing = 0;
  int window_kib = 0;  // 0: automatic
  int window_tensors = 0;
  int blocking = 0;
  int verify = 0;
  int offload_leaves = 0;
  int copies_casts = 0;  // of weights
  int min_bytes = 1;
  int target = 0;          // 1: automatic, 2: a number
  int target_percent = 0;  // of the way from the least to the peak without offload
  int prefetch_kib = 0;    // 0: as window_kib
  // Every second scope belongs to a second session, whose eviction window is 1: one byte, 2: 1 MiB,
  // 3: one tensor. Ignored where `target` is 2.
  int other_session = 0;
  int heads = 0;               // 1: the last matrix, 2: all other parameters, 3: both
  int measured_link = 0;       // 1: before the first step, 2: in the first step
  int chunk_kib = 0;           // the engine's largest chunk; 0: its default
  int traces = 0;              // 1: to a sink, 2: transfer times in the statistics alone
  int weight_window = 0;       // in matrices; ignored where `target` is 2
  int forgets_generators = 0;  // in checkpoints whose segments draw no random numbers
  int unchecked_segments = 0;  // DeterminismCheck::kNone
  int guarded_segments = 0;    // a destructor in each segment calls an operator

  // The host. Limits are ignored where weights are streamed or the backing is slow: both fail
  // without host memory. A model with streamed weights is `other_model`, too.
  int segment_kib = 0;   // 0: 1 MiB
  int host_kib = 0;      // the most that is pinned; 0: no limit
  int host_is_full = 0;  // above the watermark in 1: even steps, 2: odd steps
  int pageable = 0;      // memory in place of what cannot be pinned
  int host_wait_ms = 0;  // for blocks whose copies are in flight

  // Whether a step, counted from 0, computes metrics, repeats operators, or runs the other model.
  bool IsOdd(int step) const;
  // Whether the step is odd, and the first of its kind.
  bool IsFirstOddOfItsKind(int step) const { return step < kOddStepPeriod && IsOdd(step); }
  static bool IsFourth(int step) { return step % kOddStepPeriod == kOddStepPeriod - 1; }
  bool MeasuresInForward(int step) const { return odd_steps_measure % 2 == 1 && IsFourth(step); }
  bool MeasuresAfterForward(int step) const {
    return odd_steps_measure != 0 && odd_steps_measure % 2 == 0 && IsFourth(step);
  }

  // Equal seeds give equal programs.
  static Program Draw(uint64_t seed);
  // Adds operators and changes settings. InvalidArgument names what cannot be read.
  absl::Status Add(absl::string_view text);
  // What differs from the defaults, separated by `separator`, as Add reads it.
  std::string ToString(absl::string_view separator = "; ") const;

  bool operator==(const Program&) const = default;
};

struct Setting {
  absl::string_view name;
  int Program::*value;
};
absl::Span<const Setting> Settings();

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_PROGRAM_H_
