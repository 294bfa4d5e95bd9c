// Formats a bandwidth run for people and for tools that read nvbandwidth's JSON. Pure.

#ifndef PINION_BENCH_BANDWIDTH_TEXT_H_
#define PINION_BENCH_BANDWIDTH_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

// Returns nvbandwidth's matrices, bandwidth by size, fitted curves, and the share of the link's
// rated speed.
std::string BandwidthText(const BandwidthResult& result);

// As in nvbandwidth, matrix entries are strings, "N/A" is an unmeasured entry, and a case is
// Passed, Waived or Error. Values are those of the largest size in pinned memory.
nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_TEXT_H_
