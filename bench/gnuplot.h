// Draws results with gnuplot.
//
//   PINION_RETURN_IF_ERROR(CheckPlot(path));                  // before anything is measured
//   return DrawWithGnuplot(path, [&](const std::string& terminal, const std::string& output) {
//     return absl::StrCat("set terminal ", terminal, "\n ...");
//   });

#ifndef PINION_BENCH_GNUPLOT_H_
#define PINION_BENCH_GNUPLOT_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace pinion {

// Returns OK if `path` ends in .svg or .png and gnuplot is installed. Errors name the remedy.
absl::Status CheckPlot(const std::string& path);

// Runs the script that `script` returns for a terminal ("svg" or "png") and a file. Leaves no
// partial file at `path`.
absl::Status DrawWithGnuplot(
    const std::string& path,
    absl::FunctionRef<std::string(const std::string& terminal, const std::string& output)> script);

// Returns `text` in gnuplot's double quotes.
std::string GnuplotQuoted(const std::string& text);

}  // namespace pinion

#endif  // PINION_BENCH_GNUPLOT_H_
