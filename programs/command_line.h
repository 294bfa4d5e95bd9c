// The command line of a program, and the signals that end it early.
//
//   int main(int argc, char** argv) {
//     const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
//     pinion::StopBySignal();
//     while (pinion::StopSignal() == 0 && HasMore()) Step();
//     ... writes its results ...
//     return pinion::StopSignal() == 0 ? 0 : 128 + pinion::StopSignal();
//   }
//
// Thread safety: StopSignal is thread-safe; the other functions are for main().

#ifndef PINION_PROGRAMS_COMMAND_LINE_H_
#define PINION_PROGRAMS_COMMAND_LINE_H_

#include <vector>

namespace pinion {

// Like absl::ParseCommandLine. Exception: a request for help (--help, --helpfull, --version, ...)
// exits with 0.
std::vector<char*> ParseFlags(int argc, char** argv);

// Makes StopSignal report the first SIGINT (Ctrl-C) or SIGTERM. A second one kills the program.
void StopBySignal();
// Returns the received signal; 0: none.
int StopSignal();

}  // namespace pinion

#endif  // PINION_PROGRAMS_COMMAND_LINE_H_
