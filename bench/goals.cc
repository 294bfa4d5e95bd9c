#include "pinion/bench/goals.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "pinion/examples/output_file.h"

namespace pinion {

std::string Bound::ToString() const {
  return absl::StrFormat("%s %.4g", kind == Kind::kAtLeast ? ">=" : "<=", limit);
}

bool BenchReport::AllMet() const {
  return std::all_of(goals_.begin(), goals_.end(), [](const Goal& goal) { return goal.met(); });
}

nlohmann::ordered_json BenchReport::ToJson() const {
  nlohmann::ordered_json goals = nlohmann::ordered_json::array();
  for (const Goal& goal : goals_) {
    nlohmann::ordered_json json;
    json["name"] = goal.name;
    json["goal"] = goal.bound.ToString();
    json["value"] = goal.value ? nlohmann::ordered_json(*goal.value) : nullptr;
    json["met"] = goal.met();
    goals.push_back(std::move(json));
  }
  return {{"rows", rows_}, {"goals", std::move(goals)}};
}

std::string BenchReport::GoalsText() const {
  std::string text;
  for (const Goal& goal : goals_) {
    absl::StrAppendFormat(
        &text, "%s  %s: %s (goal %s)\n", goal.met() ? "met   " : "MISSED", goal.name,
        goal.value ? absl::StrFormat("%.4g", *goal.value) : "not measured", goal.bound.ToString());
  }
  return text;
}

absl::Status BenchReport::Write(const std::string& path) const {
  return WriteAtomically(path, ToJson().dump(1) + "\n");
}

}  // namespace pinion
