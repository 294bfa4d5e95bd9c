// Formats a bandwidth run as CSV: a header line, then a line per size. Pure.

#ifndef PINION_BENCH_BANDWIDTH_CSV_H_
#define PINION_BENCH_BANDWIDTH_CSV_H_

#include <string>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

std::string BandwidthCsv(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_CSV_H_
