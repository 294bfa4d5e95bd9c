#include "pinion/bench/nvbandwidth_json.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace pinion {
namespace {

nlohmann::ordered_json CaseJson(const CaseResult& of_case, int columns) {
  nlohmann::ordered_json json;
  json["name"] = of_case.name;
  json["status"] = CaseStatusName(of_case.status);
  if (of_case.status != CaseStatus::kPassed) {
    if (of_case.status == CaseStatus::kError) json["error"] = of_case.reason;
    return json;
  }
  json["bandwidth_description"] = of_case.description;
  std::vector<double> values;
  for (const std::vector<std::optional<double>>& row : of_case.Matrix(columns)) {
    nlohmann::ordered_json texts = nlohmann::ordered_json::array();
    for (const std::optional<double>& value : row) {
      texts.push_back(value ? absl::StrFormat("%g", *value) : "N/A");
      if (value) values.push_back(*value);
    }
    json["bandwidth_matrix"].push_back(std::move(texts));
  }
  double sum = 0;
  for (const double value : values) sum += value;
  json["sum"] = sum;
  if (values.empty()) return json;
  json["min"] = *std::min_element(values.begin(), values.end());
  json["max"] = *std::max_element(values.begin(), values.end());
  json["average"] = sum / static_cast<double>(values.size());
  return json;
}

}  // namespace

nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result) {
  nlohmann::ordered_json json;
  json["version"] = "Pinion";
  json["git_version"] = "";
  json["CUDA Runtime Version"] = result.cuda_runtime_version;
  json["Driver Version"] = result.driver_version;
  json["GPU Device list"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < result.devices.size(); ++i) {
    json["GPU Device list"].push_back(absl::StrCat(i, ": ", result.devices[i].info.model));
  }
  std::vector<std::string> warnings = result.warnings;
  if (result.modelled) warnings.push_back("all values are modelled, none was measured");
  if (!warnings.empty()) json["warning"] = absl::StrJoin(warnings, "; ");
  json["testcases"] = nlohmann::ordered_json::array();
  for (const CaseResult& of_case : result.cases) {
    json["testcases"].push_back(CaseJson(of_case, static_cast<int>(result.devices.size())));
  }
  return {{"nvbandwidth", std::move(json)}};
}

}  // namespace pinion
