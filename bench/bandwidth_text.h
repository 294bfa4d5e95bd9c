// Formats a bandwidth run for people: nvbandwidth's matrices, bandwidth by size, fitted curves, and
// the share of the link's rated speed. Pure.

#ifndef PINION_BENCH_BANDWIDTH_TEXT_H_
#define PINION_BENCH_BANDWIDTH_TEXT_H_

#include <string>

#include "pinion/bench/bandwidth_result.h"

namespace pinion {

std::string BandwidthText(const BandwidthResult& result);

// Names a series without its device: "H2D", "D2H beside H2D", "H2D pageable", "H2D, node 1".
std::string SeriesLabel(const CaseResult& of_case, const Series& series);

}  // namespace pinion

#endif  // PINION_BENCH_BANDWIDTH_TEXT_H_
