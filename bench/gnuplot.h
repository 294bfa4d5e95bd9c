// Pictures of what was measured, by gnuplot.
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

// Whether a picture could be drawn to `path`: its name ends in .svg or .png, and gnuplot is there.
// The error says what to do.
absl::Status CheckPlot(const std::string& path);

// Runs what `script` gives for a terminal ("svg" or "png") and a file. Leaves nothing half-drawn at
// `path`.
absl::Status DrawWithGnuplot(
    const std::string& path,
    absl::FunctionRef<std::string(const std::string& terminal, const std::string& output)> script);

// In gnuplot's double quotes.
std::string GnuplotQuoted(const std::string& text);

}  // namespace pinion

#endif  // PINION_BENCH_GNUPLOT_H_
