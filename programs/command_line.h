// The command line of a program, the folder and the sizes that it names, and the signals that end
// the program early.
//
//   int main(int argc, char** argv) {
//     const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
//     absl::Status status = pinion::EnterWorkingDirectory();
//     pinion::StopBySignal();
//     while (pinion::StopSignal() == 0 && HasMore()) Step();
//     ... writes its results ...
//     return pinion::StopSignal() == 0 ? 0 : 128 + pinion::StopSignal();
//   }
//
// Thread safety: StopSignal and ParseBytes are thread-safe; the other functions are for main().

#ifndef PINION_PROGRAMS_COMMAND_LINE_H_
#define PINION_PROGRAMS_COMMAND_LINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

// Like absl::ParseCommandLine. Exception: a request for help (--help, --helpfull, --version, ...)
// exits with 0.
std::vector<char*> ParseFlags(int argc, char** argv);

// `bazel run` starts programs in their runfiles. This returns to the folder of the command, in
// which the paths of its flags are. Without `bazel run` it does nothing. Call it first in main.
absl::Status EnterWorkingDirectory();

// Parses "96MiB", "1.5GiB", "512KiB", "4096B" or "4096", up to 2^50. InvalidArgument names `flag`,
// `text`, and `other`, the flag's alternative to a size.
absl::StatusOr<uint64_t> ParseBytes(const char* flag, const std::string& text, const char* other);

// Makes StopSignal report the first SIGINT (Ctrl-C) or SIGTERM. A second one kills the program.
void StopBySignal();
// Returns the received signal; 0: none.
int StopSignal();

}  // namespace pinion

#endif  // PINION_PROGRAMS_COMMAND_LINE_H_
