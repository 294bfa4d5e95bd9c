// //tools/portable as a user has it on another machine: a copy, no environment, another folder to
// start from.

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
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

  // The lines of ldd's answer that have `part` in them, beside LibTorch.
  static std::string Loads(const std::string& file, const std::string& part) {
    const ProgramOutcome libraries =
        RunProgram(absl::StrCat("cd / && exec env -i LD_LIBRARY_PATH=", kTorch, "/lib:", kTorch,
                                "/../nvidia/cu13/lib ldd ", Folder(), "/", file));
    EXPECT_EQ(libraries.exit_code, 0) << libraries.err;
    std::istringstream lines(libraries.out);
    std::string found;
    for (std::string line; std::getline(lines, line);) {
      if (line.find(part) != std::string::npos) found += line + "\n";
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
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("/no/torch"), HasSubstr("TORCH_PATH")));
}

TEST_F(PortableTest, AnotherReleaseOfLibTorchIsRefusedByItsVersion) {
  const std::string torch = ::testing::TempDir() + "/torch";
  std::filesystem::create_directories(torch + "/lib");
  std::ofstream(torch + "/lib/libtorch_cpu.so").close();
  std::ofstream(torch + "/version.py") << "__version__ = '2.9.1+cu130'\n";
  const ProgramOutcome outcome = Run("train_gpt --help", "TORCH_PATH=" + torch);
  EXPECT_EQ(outcome.exit_code, 1);
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
  for (const char* file :
       {"libexec/train_gpt", "libexec/bandwidth", "libexec/engine_bench", "libexec/allocator_bench",
        "libexec/cuda_gpu_test", "lib/libpinion_torch_impl.so"}) {
    SCOPED_TRACE(file);
    EXPECT_EQ(Loads(file, "not found"), "");
    const std::string abseil = Loads(file, "libabsl_");
    EXPECT_THAT(abseil, HasSubstr(Folder()));
    EXPECT_EQ(abseil.find("=> /lib"), std::string::npos) << abseil;
    EXPECT_EQ(abseil.find("=> /usr"), std::string::npos) << abseil;
  }
}

}  // namespace
}  // namespace pinion::testing
