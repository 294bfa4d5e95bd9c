#include "pinion/programs/command_line.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "absl/flags/parse.h"

namespace pinion {
namespace {

std::atomic<int> stop_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

bool AsksForHelp(std::string_view argument) {
  argument.remove_prefix(std::min(argument.find_first_not_of('-'), argument.size()));
  return argument.substr(0, 4) == "help" || argument == "version";
}

}  // namespace

std::vector<char*> ParseFlags(int argc, char** argv) {
  // Abseil ends the program with 1.
  if (std::any_of(argv + 1, argv + argc, AsksForHelp)) {
    std::atexit([] {
      std::cout.flush();
      std::fflush(nullptr);
      std::_Exit(0);
    });
  }
  return absl::ParseCommandLine(argc, argv);
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
