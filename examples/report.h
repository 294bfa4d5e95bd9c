// Formats train_gpt's output.

#ifndef PINION_EXAMPLES_REPORT_H_
#define PINION_EXAMPLES_REPORT_H_

#include <cstdio>
#include <string>
#include <vector>

#include "pinion/examples/compare.h"
#include "pinion/examples/text_data.h"
#include "pinion/examples/training_run.h"
#include "pinion/programs/run_options.h"

namespace pinion {

// Describes the run. `device` adds to its device, such as "scaled so that ...", or is empty.
std::string HeaderText(const RunOptions& options, const std::string& device, const TextData& text);

// Summarizes one run.
std::string SummaryText(const RunOptions& options, const RunResult& result, bool modelled);

// Prints progress as a line that is rewritten on a terminal. Elsewhere prints a line for the first,
// every tenth and the last step.
//
// Thread safety: one thread.
class ProgressPrinter {
 public:
  // `modelled`: the line says that the link's times are modelled.
  ProgressPrinter(FILE* file, bool modelled);
  ~ProgressPrinter();  // ends the line
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void Print(const StepProgress& progress);

 private:
  FILE* file_;
  bool modelled_;
  bool terminal_;
  bool line_open_ = false;
};

// Compares a streamed-weights run's peak with its bound: the two largest layers with gradients, and
// the peak of activations in the run with resident weights (`resident`).
std::string PeakAndBound(const RunResult& streamed, const RunResult& resident);

// Returns the groups' runs as a table with a header.
std::string ComparisonTable(const std::vector<ComparedGroup>& groups, bool modelled);

// Returns {"runs": [{"name", "preset", "losses", "peak_device_bytes", ...}]} in the groups' order.
// Values that were not measured or compared are null: "bit_identical" of a run without offload,
// "repeats_itself" of other runs.
std::string ToJson(const std::vector<ComparedGroup>& groups);

}  // namespace pinion

#endif  // PINION_EXAMPLES_REPORT_H_
