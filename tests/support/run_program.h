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

// Runs `command`, in shell syntax, among the test's runfiles, and returns its exit code, or -1 if
// it was killed. Its output is the test's. Its programs find a host with ample RAM (roomy_host.cc).
// Exception: not under sanitizers, which must be loaded first.
inline int RunVisibly(const std::string& command) {
#if !defined(ABSL_HAVE_ADDRESS_SANITIZER) && !defined(ABSL_HAVE_THREAD_SANITIZER)
  const std::string host = std::filesystem::absolute("tests/support/roomy_host.so").string();
  setenv("LD_PRELOAD", host.c_str(), /*overwrite=*/1);
  const absl::Cleanup unset = [] { unsetenv("LD_PRELOAD"); };
#endif
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The same, and returns the output as well.
inline ProgramOutcome RunProgram(const std::string& command) {
  const std::string out = ::testing::TempDir() + "/out", err = ::testing::TempDir() + "/err";
  const int exit_code = RunVisibly(command + " >" + out + " 2>" + err);
  return {exit_code, FileContents(out), FileContents(err)};
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_RUN_PROGRAM_H_
