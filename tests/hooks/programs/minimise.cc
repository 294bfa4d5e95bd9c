#include "pinion/tests/hooks/programs/minimise.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"

namespace pinion::testing {
namespace {

using Fails = absl::FunctionRef<bool(const Program&)>;

// Takes the candidate and returns true if it fails as well.
bool Take(Program& program, const Program& candidate, Fails fails) {
  if (candidate == program || !fails(candidate)) return false;
  program = candidate;
  return true;
}

// Large groups of operators first.
bool RemoveOps(Program& program, Fails fails) {
  bool any = false;
  for (size_t count = std::max<size_t>(program.ops.size() / 2, 1); count > 0; count /= 2) {
    for (size_t begin = 0; begin < program.ops.size();) {
      Program candidate = program;
      const auto first = candidate.ops.begin() + static_cast<ptrdiff_t>(begin);
      candidate.ops.erase(
          first, first + static_cast<ptrdiff_t>(std::min(count, program.ops.size() - begin)));
      if (Take(program, candidate, fails)) {
        any = true;
      } else {
        begin += count;
      }
    }
  }
  return any;
}

// Resets settings to the simplest value, or to one nearer to it.
bool SetBack(Program& program, Fails fails) {
  bool any = false;
  for (const Setting& setting : Settings()) {
    const int simplest = Program().*setting.value;
    for (bool again = true; again;) {
      again = false;
      const int value = program.*setting.value;
      for (const int nearer : {simplest, simplest + (value - simplest) / 2}) {
        if (again) continue;
        Program candidate = program;
        candidate.*setting.value = nearer;
        again = Take(program, candidate, fails);
      }
      any |= again;
    }
  }
  return any;
}

bool SimplifyOps(Program& program, Fails fails) {
  bool any = false;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    for (int Op::*const number : {&Op::out, &Op::in, &Op::other, &Op::extra}) {
      Program candidate = program;
      candidate.ops[i].*number = 0;
      any |= Take(program, candidate, fails);
    }
  }
  return any;
}

}  // namespace

Program Minimise(Program program, Fails fails) {
  for (bool any = true; any;) {
    any = RemoveOps(program, fails);
    any |= SetBack(program, fails);
    any |= SimplifyOps(program, fails);
  }
  return program;
}

std::string DescribeMinimal(const Program& program, const Verdict& verdict) {
  constexpr size_t kSameBeginning = 24;  // of the message of an error
  Verdict minimal_verdict = verdict;
  const Program minimal = Minimise(program, [&](const Program& candidate) {
    // A failure at the least memory may have another reason than one above it.
    if (candidate.target_percent != program.target_percent) return false;
    Verdict found = RunProgram(candidate);
    if (found.kind != verdict.kind) return false;
    if (found.kind == FailureKind::kError &&
        found.what.substr(0, kSameBeginning) != verdict.what.substr(0, kSameBeginning)) {
      return false;
    }
    minimal_verdict = std::move(found);
    return true;
  });
  return absl::StrCat(
      "minimal program: ", minimal_verdict.ToString(), "\n  ", minimal.ToString("\n  "),
      "\n./bazelw run --config=opt //tests/hooks/programs:run_programs -- --program=\"",
      minimal.ToString(), "\"");
}

}  // namespace pinion::testing
