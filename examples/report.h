// What train_gpt prints and writes.

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

// What is run, for people: `device` says more of it, such as "scaled so that ...", or is empty.
std::string HeaderText(const RunOptions& options, const std::string& device, const TextData& text);

// What one run gave, for people.
std::string SummaryText(const RunOptions& options, const RunResult& result, bool modelled);

// A line that rewrites itself on a terminal; elsewhere a line for the first step, every tenth and
// the last.
//
// Thread safety: one thread.
class ProgressPrinter {
 public:
  // `modelled`: times of the link are; the line says so.
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

// For people: the peak of a run whose weights visit the device, and what it may be at most: the two
// largest layers with their gradients, and what the activations of the same run take at their peak
// where the weights are on the device (`resident`).
std::string PeakAndBound(const RunResult& visiting, const RunResult& resident);

// The group's runs as a table with a header, for people.
std::string ComparisonTable(const std::vector<ComparedGroup>& groups, bool modelled);

// {"runs": [{"name", "preset", "losses", "peak_device_bytes", ...}]}; the runs in the groups'
// order. What was not measured or compared is null: "bit_identical" of a run without offload, and
// "repeats_itself" of all others.
std::string ToJson(const std::vector<ComparedGroup>& groups);

}  // namespace pinion

#endif  // PINION_EXAMPLES_REPORT_H_
