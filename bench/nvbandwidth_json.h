// A bandwidth run in nvbandwidth's own JSON, so that what reads its results reads ours. Pure.
//
// As there, matrix entries are strings, "N/A" is what was not measured, and a case has the status
// Passed, Waived or Error. The values are those of the largest size in pinned memory.

#ifndef PINION_BENCH_NVBANDWIDTH_JSON_H_
#define PINION_BENCH_NVBANDWIDTH_JSON_H_

#include <nlohmann/json.hpp>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

nlohmann::ordered_json NvbandwidthJson(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_NVBANDWIDTH_JSON_H_
