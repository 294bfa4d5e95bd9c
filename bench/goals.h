// The results of a benchmark, in one format for all programs under bench/:
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
// The run judges a goal from its rows. A goal without rows, because a filter excluded them, has no
// value: it is neither met nor missed.
//
// Thread safety: a value; one thread at a time.

#ifndef PINION_BENCH_GOALS_H_
#define PINION_BENCH_GOALS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"

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
  std::optional<double> value;  // nullopt: not measured

  bool met() const { return value.has_value() && bound.Holds(*value); }
  bool missed() const { return value.has_value() && !bound.Holds(*value); }
};

// Returns the value of the row that is nearest to missing `bound`, or misses it the most.
template <typename Row, typename Value>
std::optional<double> Worst(Bound bound, const std::vector<Row>& rows, const Value& value) {
  std::optional<double> worst;
  for (const Row& row : rows) {
    const std::optional<double> found = value(row);
    if (!found.has_value()) continue;
    const bool is_worse = bound.kind == Bound::Kind::kAtLeast ? *found < worst.value_or(*found)
                                                              : *found > worst.value_or(*found);
    if (is_worse || !worst.has_value()) worst = found;
  }
  return worst;
}

// Returns a table with a line per row and a column per field. Fields that all rows share make the
// heading.
std::string RowsText(absl::Span<const nlohmann::ordered_json> rows);

class BenchReport {
 public:
  // A row is a flat object. Rows of one report need not have the same fields.
  void AddRow(nlohmann::ordered_json row) { rows_.push_back(std::move(row)); }
  void AddGoal(std::string name, Bound bound, std::optional<double> value) {
    goals_.push_back({std::move(name), bound, value});
  }

  // Adds a goal whose value is the worst of `value(row)`, an optional. Rows without one do not
  // count.
  template <typename Row, typename Value>
  void AddGoal(std::string name, Bound bound, const std::vector<Row>& rows, const Value& value) {
    AddGoal(std::move(name), bound, Worst(bound, rows, value));
  }

  // Adds the goal that `is_wrong` holds for no row. Its value is the number of those rows; without
  // rows it has none.
  template <typename Row, typename IsWrong>
  void AddNoneGoal(std::string name, const std::vector<Row>& rows, const IsWrong& is_wrong) {
    const auto wrong = static_cast<double>(std::count_if(rows.begin(), rows.end(), is_wrong));
    AddGoal(std::move(name), AtMost(0), rows.empty() ? std::nullopt : std::optional(wrong));
  }

  const std::vector<Goal>& goals() const { return goals_; }

  // Prints the rows that were added since the last call (RowsText).
  void PrintRows();

  nlohmann::ordered_json ToJson() const;
  // Returns one line per goal: "met     name: value (goal >= 0.98)"; "MISSED  ..."; "-       name:
  // not measured ...". Empty without goals.
  std::string GoalsText() const;

  // Ends a run: prints the goals to stdout and writes the whole file or none, unless `path` is
  // empty. OutOfRange names the missed goals.
  absl::Status Finish(const std::string& path) const;

 private:
  std::vector<nlohmann::ordered_json> rows_;
  size_t printed_rows_ = 0;
  std::vector<Goal> goals_;
};

// Prints an error to stderr. Returns 0; 1 for missed goals (OutOfRange); 2 for other errors.
int ExitCode(const char* program, const absl::Status& status);

struct Summary {
  int samples = 0;
  double median = 0;
  double p5 = 0;
  double p95 = 0;
  double cv = 0;  // coefficient of variation: standard deviation / mean, as a fraction; 0 for one
};

// Returns the value below which `share` of the sorted, nonempty values lie, linearly interpolated
// between its neighbours.
double Quantile(const std::vector<double>& sorted, double share);

// Summarizes at least one value, in any order.
Summary Summarize(std::vector<double> values);

inline double Mib(uint64_t bytes) { return static_cast<double>(bytes) / kMiB; }

}  // namespace pinion

#endif  // PINION_BENCH_GOALS_H_
