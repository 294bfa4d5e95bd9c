#include "pinion/programs/command_line.h"

#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

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

void StopBySignal() {
  struct sigaction action = {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int StopSignal() { return stop_signal; }

}  // namespace pinion
