// Runs a program as a user does, and says what came of it.

#ifndef PINION_TESTS_SUPPORT_RUN_PROGRAM_H_
#define PINION_TESTS_SUPPORT_RUN_PROGRAM_H_

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

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

// `command` in the shell's syntax, among the test's runfiles.
inline ProgramOutcome RunProgram(const std::string& command) {
  const std::string out = ::testing::TempDir() + "/out", err = ::testing::TempDir() + "/err";
  const int status = std::system((command + " >" + out + " 2>" + err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, FileContents(out), FileContents(err)};
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_RUN_PROGRAM_H_
