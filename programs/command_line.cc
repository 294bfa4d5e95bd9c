#include "pinion/programs/command_line.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

std::atomic<int> stop_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

// True while Abseil parses a command line that asks for help.
bool parses_request_for_help = false;

// Returns whether a flag, not a flag's value, asks for help.
bool AsksForHelp(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (flag == "--") return false;
    if (!absl::ConsumePrefix(&flag, "-")) continue;
    absl::ConsumePrefix(&flag, "-");
    const absl::string_view name = flag.substr(0, flag.find('='));
    for (const char* const request :
         {"help", "helpfull", "helpshort", "helppackage", "helpmatch", "helpon", "version"}) {
      if (name == request) return true;
    }
    const absl::CommandLineFlag* const known = absl::FindCommandLineFlag(name);
    const bool has_value_behind = known != nullptr && name == flag && !known->IsOfType<bool>();
    if (has_value_behind) ++i;
  }
  return false;
}

}  // namespace

std::vector<char*> ParseFlags(int argc, char** argv) {
  parses_request_for_help = AsksForHelp(argc, argv);
  // Abseil exits with 1 after a request for help.
  std::atexit([] {
    if (!parses_request_for_help) return;
    std::cout.flush();
    std::fflush(nullptr);
    std::_Exit(0);
  });
  std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  parses_request_for_help = false;
  return arguments;
}

absl::Status EnterWorkingDirectory() {
  const char* const typed_in = std::getenv("BUILD_WORKING_DIRECTORY");
  if (typed_in == nullptr || chdir(typed_in) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot go to BUILD_WORKING_DIRECTORY=", typed_in, ": ", std::strerror(errno)));
}

absl::StatusOr<uint64_t> ParseBytes(const char* flag, const std::string& text, const char* other) {
  const size_t digits_end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string unit = text.substr(digits_end);
  double value = 0;
  double scale = 0;
  for (const auto& [name, bytes] : {std::pair<const char*, uint64_t>{"", 1},
                                    {"B", 1},
                                    {"KiB", kKiB},
                                    {"MiB", kMiB},
                                    {"GiB", kGiB}}) {
    if (unit == name) scale = static_cast<double>(bytes);
  }
  constexpr double kMost = static_cast<double>(uint64_t{1} << 50);
  if (!absl::SimpleAtod(text.substr(0, digits_end), &value) || scale == 0 ||
      !(value * scale >= 1 && value * scale <= kMost)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", text,
                     " is not a size: write it as 96MiB, 1.5GiB, a number of bytes, or ", other));
  }
  return static_cast<uint64_t>(value * scale);
}

void StopBySignal() {
  struct sigaction action = {};
  action.sa_handler = [](int received) {
    stop_signal = received;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
  };
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int StopSignal() { return stop_signal; }

}  // namespace pinion
