// Runs a program as a user does, and returns its exit code and output.

#ifndef PINION_TESTS_SUPPORT_RUN_PROGRAM_H_
#define PINION_TESTS_SUPPORT_RUN_PROGRAM_H_

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/base/config.h"
#include "absl/cleanup/cleanup.h"
#include "gtest/gtest.h"

namespace pinion::testing {

struct ProgramOutcome {
  int exit_code = -1;  // -1: it was killed
  std::string out;
  std::string err;
};

inline std::string FileContents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Hosts that programs find (roomy_host.cc): with ample RAM, and with 95 % of it in use.
inline constexpr char kRoomyHost[] = "roomy_host.so";
inline constexpr char kFullHost[] = "full_host.so";

// Runs `command`, in shell syntax, among the test's runfiles, and returns its exit code, or -1 if
// it was killed. Its output is the test's. Its programs find `host`. Exception: the real one under
// sanitizers, which must be loaded first.
inline int RunVisibly(const std::string& command, const char* host = kRoomyHost) {
#if !defined(ABSL_HAVE_ADDRESS_SANITIZER) && !defined(ABSL_HAVE_THREAD_SANITIZER)
  const std::filesystem::path library = std::filesystem::path("tests/support") / host;
  setenv("LD_PRELOAD", std::filesystem::absolute(library).c_str(), /*overwrite=*/1);
  const absl::Cleanup unset = [] { unsetenv("LD_PRELOAD"); };
#endif
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The same, and returns the output as well.
inline ProgramOutcome RunProgram(const std::string& command, const char* host = kRoomyHost) {
  const std::string out = ::testing::TempDir() + "/out", err = ::testing::TempDir() + "/err";
  const int exit_code = RunVisibly(command + " >" + out + " 2>" + err, host);
  return {exit_code, FileContents(out), FileContents(err)};
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_RUN_PROGRAM_H_
