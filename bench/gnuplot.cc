#include "pinion/bench/gnuplot.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "pinion/programs/output_file.h"

namespace pinion {

absl::Status CheckPlot(const std::string& path) {
  if (!absl::EndsWith(path, ".svg") && !absl::EndsWith(path, ".png")) {
    return absl::InvalidArgumentError(absl::StrCat("--plot=", path, " must end in .svg or .png"));
  }
  if (std::system("command -v gnuplot >/dev/null") != 0) {
    return absl::NotFoundError("--plot needs gnuplot: apt-get install gnuplot-nox");
  }
  return absl::OkStatus();
}

absl::Status DrawWithGnuplot(
    const std::string& path,
    absl::FunctionRef<std::string(const std::string& terminal, const std::string& output)> script) {
  return WriteAtomically(path, [&](const std::string& temporary) -> absl::Status {
    const std::string text = script(absl::EndsWith(path, ".png") ? "png" : "svg", temporary);
    std::FILE* const gnuplot = popen("gnuplot", "w");
    if (gnuplot == nullptr) return absl::UnavailableError("gnuplot cannot be started");
    const bool told = std::fwrite(text.data(), 1, text.size(), gnuplot) == text.size();
    const int exit_status = pclose(gnuplot);
    if (told && exit_status == 0) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("gnuplot failed with the exit status ", exit_status, ", see above"));
  });
}

std::string GnuplotQuoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace pinion
