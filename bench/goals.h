// What a benchmark run found, in one shape for every program under bench/:
//
//   {"rows": [...], "goals": [{"name", "goal", "value", "met"}, ...]}
//
//   BenchReport report;
//   report.AddRow({{"case", "host_to_device"}, {"gb_per_s", 55.1}});
//   report.AddGoal("pinned H2D over nvbandwidth", AtLeast(0.98), 0.991);
//   return report.Finish(absl::GetFlag(FLAGS_json));
//   ...
//   return ExitCode("bandwidth", status);               // in main
//
// A goal is judged by the run itself, from its rows. A goal that nothing was measured for, because
// a filter left its rows out, is added without a value: it is neither met nor missed.
//
// Thread safety: a value; one thread at a time.

#ifndef PINION_BENCH_GOALS_H_
#define PINION_BENCH_GOALS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

struct Bound {
  enum class Kind { kAtLeast, kAtMost };
  Kind kind = Kind::kAtLeast;
  double limit = 0;

  bool Holds(double value) const {
    return kind == Kind::kAtLeast ? value >= limit : value <= limit;
  }
  std::string ToString() const;  // ">= 0.98"
};

inline Bound AtLeast(double limit) { return {Bound::Kind::kAtLeast, limit}; }
inline Bound AtMost(double limit) { return {Bound::Kind::kAtMost, limit}; }

struct Goal {
  std::string name;
  Bound bound;
  std::optional<double> value;  // none: nothing was measured

  bool met() const { return value.has_value() && bound.Holds(*value); }
  bool missed() const { return value.has_value() && !bound.Holds(*value); }
};

class BenchReport {
 public:
  // A row is a flat object. Rows of one report need not have the same fields.
  void AddRow(nlohmann::ordered_json row) { rows_.push_back(std::move(row)); }
  void AddGoal(std::string name, Bound bound, std::optional<double> value) {
    goals_.push_back({std::move(name), bound, value});
  }

  const std::vector<nlohmann::ordered_json>& rows() const { return rows_; }
  const std::vector<Goal>& goals() const { return goals_; }

  nlohmann::ordered_json ToJson() const;
  // One line per goal: "met     name: value (goal >= 0.98)"; "MISSED  ..."; "-       name: not
  // measured ...". Empty without goals.
  std::string GoalsText() const;
  // Never leaves half a file.
  absl::Status Write(const std::string& path) const;

  // The end of a run: prints the goals to stdout and writes the file, unless `path` is empty.
  // OutOfRange names the goals that are missed.
  absl::Status Finish(const std::string& path) const;

 private:
  std::vector<nlohmann::ordered_json> rows_;
  std::vector<Goal> goals_;
};

// Prints the error, if it is one, to stderr. 0; 1 for goals that are missed (OutOfRange); 2 for all
// other errors: the program could not run, or what it ran went wrong.
int ExitCode(const char* program, const absl::Status& status);

}  // namespace pinion

#endif  // PINION_BENCH_GOALS_H_
