// A bandwidth run as one line per size, with a header line. Pure.

#ifndef PINION_BENCH_BANDWIDTH_CSV_H_
#define PINION_BENCH_BANDWIDTH_CSV_H_

#include <string>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

std::string BandwidthCsv(const BandwidthResult& result);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_CSV_H_
