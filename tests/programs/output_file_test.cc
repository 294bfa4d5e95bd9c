#include "pinion/programs/output_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

class OutputFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }

  size_t FileCount() const {
    return std::distance(std::filesystem::directory_iterator(directory_), {});
  }

  static std::string Contents(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string directory_ = testing::TempDir() + "/output_file_test";
  const std::string path_ = directory_ + "/file";
};

TEST_F(OutputFileTest, CheckWritableLeavesNoTrace) {
  EXPECT_TRUE(CheckWritable(path_).ok());
  EXPECT_EQ(FileCount(), 0);
}

TEST_F(OutputFileTest, CheckWritableKeepsWhatIsThere) {
  std::ofstream(path_) << "old";
  EXPECT_TRUE(CheckWritable(path_).ok());
  EXPECT_EQ(Contents(path_), "old");
}

TEST_F(OutputFileTest, CheckWritableNamesThePathAndTheReason) {
  const std::string missing = directory_ + "/none/file";
  const absl::Status status = CheckWritable(missing);
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(missing));
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file"));
}

TEST_F(OutputFileTest, CheckWritableRefusesWhatARenameWouldReplaceForGood) {
  EXPECT_FALSE(CheckWritable(directory_).ok());
  EXPECT_FALSE(CheckWritable("/dev/null").ok());
}

TEST_F(OutputFileTest, WriteReplacesTheFile) {
  std::ofstream(path_) << "old and longer";
  ASSERT_TRUE(WriteAtomically(path_, "new").ok());
  EXPECT_EQ(Contents(path_), "new");
  EXPECT_EQ(FileCount(), 1);
}

TEST_F(OutputFileTest, AWriterThatFailsHalfwayLeavesTheOldFileAndNothingElse) {
  std::ofstream(path_) << "old";
  const absl::Status status = WriteAtomically(path_, [](const std::string& temporary) {
    std::ofstream(temporary) << "ha";
    return absl::DataLossError("the disk is full");
  });
  EXPECT_EQ(status, absl::DataLossError("the disk is full"));
  EXPECT_EQ(Contents(path_), "old");
  EXPECT_EQ(FileCount(), 1);
}

}  // namespace
}  // namespace pinion
