// Runs a copy of //tools/portable without environment from another folder, as on another machine.

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kTorch[] = PINION_TORCH_LIB_DIR "/..";

class PortableTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::filesystem::remove_all(Folder());
    std::filesystem::copy("tools/portable/portable", Folder(),
                          std::filesystem::copy_options::recursive);
  }

  static std::string Folder() { return ::testing::TempDir() + "/elsewhere"; }

  static ProgramOutcome Run(const std::string& program, const std::string& environment = "") {
    return RunProgram(
        absl::StrCat("cd / && exec env -i ", environment, " ", Folder(), "/bin/", program));
  }

  static std::string Torch() { return absl::StrCat("TORCH_PATH=", kTorch); }

  // Returns the libraries that `file` loads besides LibTorch, as paths by name; "" if not found.
  static std::map<std::string, std::string> Loads(const std::string& file) {
    const ProgramOutcome libraries =
        RunProgram(absl::StrCat("cd / && exec env -i LD_LIBRARY_PATH=", kTorch, "/lib:", kTorch,
                                "/../nvidia/cu13/lib ldd ", Folder(), "/", file));
    EXPECT_EQ(libraries.exit_code, 0) << libraries.err;
    std::istringstream lines(libraries.out);
    std::map<std::string, std::string> found;
    for (std::string line; std::getline(lines, line);) {  // "  libm.so.6 => /lib/libm.so.6 (0x1)"
      const std::vector<std::string> words =
          absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
      if (words.size() < 3 || words[1] != "=>") continue;
      found[words[0]] = words[2][0] == '/' ? std::filesystem::canonical(words[2]).string() : "";
    }
    return found;
  }
};

TEST_F(PortableTest, TrainGptTrainsOnTheTextThatItBrings) {
  const ProgramOutcome outcome =
      Run("train_gpt --device=emu:0 --size=tiny --steps=1", Torch() + " PATH=/usr/bin:/bin");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("step 1/1"), HasSubstr("text     4")));
}

TEST_F(PortableTest, WithoutAnyEnvironmentTheErrorNamesTorchPath) {
  const ProgramOutcome outcome = Run("train_gpt --help", "PATH=/nowhere:/usr/bin:/bin");
  if (outcome.exit_code == 0) GTEST_SKIP() << "this machine's python3 has a torch of its own";
  EXPECT_THAT(outcome.err, AllOf(StartsWith("train_gpt: "), HasSubstr("set TORCH_PATH")));
}

TEST_F(PortableTest, AFolderThatIsNoLibTorchIsNamed) {
  const ProgramOutcome outcome = Run("train_gpt --help", "TORCH_PATH=/no/torch");
  EXPECT_EQ(outcome.exit_code, 127);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("/no/torch"), HasSubstr("TORCH_PATH")));
}

TEST_F(PortableTest, AnotherReleaseOfLibTorchIsRefusedByItsVersion) {
  const std::string torch = ::testing::TempDir() + "/torch";
  std::filesystem::create_directories(torch + "/lib");
  std::ofstream(torch + "/lib/libtorch_cpu.so").close();
  std::ofstream(torch + "/version.py") << "__version__ = '2.9.1+cu130'\n";
  const ProgramOutcome outcome = Run("train_gpt --help", "TORCH_PATH=" + torch);
  EXPECT_EQ(outcome.exit_code, 127);
  EXPECT_THAT(outcome.err, HasSubstr("another version (2.9.1)"));
}

TEST_F(PortableTest, LibpinionTorchSaysThatTorchHasToBeImportedFirst) {
  const std::string script = ::testing::TempDir() + "/without_torch.py";
  std::ofstream(script) << "import ctypes, sys\n"
                           "pinion = ctypes.CDLL(sys.argv[1])\n"
                           "pinion.pinion_last_error.restype = ctypes.c_char_p\n"
                           "print(pinion.pinion_install_torch_host_allocator(b'cuda', 0, 0, 0))\n"
                           "print(pinion.pinion_last_error().decode())\n";
  const ProgramOutcome outcome =
      RunProgram(absl::StrCat("cd / && exec env -i PATH=/usr/bin:/bin python3 ", script, " ",
                              Folder(), "/lib/libpinion_torch.so"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(StartsWith("-1\n"), HasSubstr("`import torch` first")));
}

TEST_F(PortableTest, EveryProgramStarts) {
  for (const char* program : {"bandwidth", "engine_bench", "allocator_bench"}) {
    const ProgramOutcome outcome = Run(absl::StrCat(program, " --help"), Torch());
    EXPECT_THAT(outcome.err + outcome.out, HasSubstr("json")) << program;
  }
  const ProgramOutcome outcome = Run("cuda_gpu_test --gtest_list_tests", Torch());
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST_F(PortableTest, NothingButTheCAndCppRuntimesComesFromTheSystem) {
  // The same pattern as in collect.sh.
  const std::regex runtimes(R"(lib(c|m|dl|pthread|rt|util|gcc_s|stdc\+\+)\.so[.0-9]*)");
  const std::string own = std::filesystem::canonical(Folder()).string() + "/";
  const std::string packages =
      std::filesystem::canonical(absl::StrCat(kTorch, "/..")).string() + "/";
  // Files that users start or load. Only these lead the loader to lib/.
  std::vector<std::string> files = {"lib/libpinion_torch.so", "lib/libpinion_torch_impl.so"};
  for (const auto& file : std::filesystem::directory_iterator(own + "libexec")) {
    files.push_back(absl::StrCat("libexec/", file.path().filename().string()));
  }
  int own_libraries = 0;
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    for (const auto& [library, path] : Loads(file)) {
      EXPECT_NE(path, "") << library << " is not found";
      if (absl::StartsWith(path, own)) ++own_libraries;
      if (absl::StartsWith(path, own) || absl::StartsWith(path, packages)) continue;
      EXPECT_TRUE(std::regex_match(library, runtimes)) << library << " comes from " << path;
    }
  }
  EXPECT_GT(own_libraries, 0);
}

}  // namespace
}  // namespace pinion::testing
