// Formats a bandwidth run as nvbandwidth's JSON, for tools that read it. Pure.
//
// As in nvbandwidth, matrix entries are strings, "N/A" is an unmeasured entry, and a case is
// Passed, Waived or Error. Values are those of the largest size in pinned memory.

#ifndef PINION_BENCH_NVBANDWIDTH_JSON_H_
#define PINION_BENCH_NVBANDWIDTH_JSON_H_

#include <nlohmann/json.hpp>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_NVBANDWIDTH_JSON_H_
