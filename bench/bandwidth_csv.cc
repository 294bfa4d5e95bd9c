#include "pinion/bench/bandwidth_csv.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/device/device.h"

namespace pinion {

std::string BandwidthCsv(const BandwidthResult& result) {
  std::string csv =
      "case,device,direction,memory,numa_node,size_bytes,samples,copies_per_sample,us_per_copy,"
      "us_p5,us_p95,cv,gb_per_s,modelled\n";
  for (const CaseResult& of_case : result.cases) {
    for (const Series& series : of_case.series) {
      for (const SizePoint& point : series.points) {
        absl::StrAppend(&csv, of_case.name, ",", series.device, ",",
                        CopyDirectionName(series.direction), ",", series.memory, ",",
                        series.numa_node, ",", point.size_bytes, ",", point.us.samples, ",",
                        point.copies);
        absl::StrAppendFormat(&csv, ",%.6g,%.6g,%.6g,%.4g,", point.us.median, point.us.p5,
                              point.us.p95, point.us.cv);
        if (!of_case.latency) absl::StrAppendFormat(&csv, "%.6g", point.gb_per_s());
        absl::StrAppend(&csv, ",", result.modelled ? "yes" : "no", "\n");
      }
    }
  }
  return csv;
}

}  // namespace pinion
