#include "pinion/bench/goals.h"

#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/programs/output_file.h"

namespace pinion {

std::string Bound::ToString() const {
  return absl::StrFormat("%s %.4g", kind == Kind::kAtLeast ? ">=" : "<=", limit);
}

nlohmann::ordered_json BenchReport::ToJson() const {
  nlohmann::ordered_json goals = nlohmann::ordered_json::array();
  for (const Goal& goal : goals_) {
    nlohmann::ordered_json json;
    json["name"] = goal.name;
    json["goal"] = goal.bound.ToString();
    json["value"] = goal.value ? nlohmann::ordered_json(*goal.value) : nullptr;
    json["met"] = goal.value ? nlohmann::ordered_json(goal.met()) : nullptr;
    goals.push_back(std::move(json));
  }
  return {{"rows", rows_}, {"goals", std::move(goals)}};
}

std::string BenchReport::GoalsText() const {
  std::string text;
  for (const Goal& goal : goals_) {
    absl::StrAppendFormat(&text, "%-6s  %s: %s (goal %s)\n",
                          goal.met()      ? "met"
                          : goal.missed() ? "MISSED"
                                          : "-",
                          goal.name,
                          goal.value ? absl::StrFormat("%.4g", *goal.value) : "not measured",
                          goal.bound.ToString());
  }
  return text;
}

absl::Status BenchReport::Write(const std::string& path) const {
  return WriteAtomically(path, ToJson().dump(1) + "\n");
}

absl::Status BenchReport::Finish(const std::string& path) const {
  std::cout << GoalsText() << std::flush;
  if (!path.empty()) PINION_RETURN_IF_ERROR(Write(path));
  std::string missed;
  for (const Goal& goal : goals_) {
    if (goal.missed()) absl::StrAppend(&missed, "\n  ", goal.name);
  }
  if (missed.empty()) return absl::OkStatus();
  return absl::OutOfRangeError("goals that are missed:" + missed);
}

int ExitCode(const char* program, const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << program << ": " << status.message() << "\n";
  return absl::IsOutOfRange(status) ? 1 : 2;
}

}  // namespace pinion
