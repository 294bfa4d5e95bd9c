#include "pinion/examples/text_data.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Lt;

TEST(TextData, VocabularyIsTheBytesThatOccurInAscendingOrder) {
  const TextData text = *TextData::Create(std::string("b\xffZa\nab", 7));
  EXPECT_EQ(text.vocabulary_bytes(), "\nZab\xff");
  EXPECT_EQ(text.vocabulary(), 5);
  EXPECT_EQ(text.size(), 7);
}

TEST(TextData, TargetsAreTheBytesAfterTheInputs) {
  // The text's bytes are consecutive, so each target is its input plus one.
  const TextData text = *TextData::Create("abcdefghij");
  const TokenBatch batch = text.Sample(/*batch=*/3, /*sequence=*/4, /*seed=*/1, /*step=*/1);
  ASSERT_EQ(batch.inputs.size(), 12);
  ASSERT_EQ(batch.targets.size(), 12);
  for (size_t i = 0; i < batch.inputs.size(); ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
    const bool starts_row = i % 4 == 0;
    EXPECT_TRUE(starts_row || batch.inputs[i] == batch.inputs[i - 1] + 1) << "at " << i;
  }
}

TEST(TextData, ABatchIsAFunctionOfSeedAndStep) {
  std::string contents;
  for (int i = 0; i < 5000; ++i) contents.push_back(static_cast<char>('a' + i * i % 26));
  const TextData text = *TextData::Create(contents);
  EXPECT_EQ(text.Sample(4, 8, 7, 3).inputs, text.Sample(4, 8, 7, 3).inputs);
  EXPECT_NE(text.Sample(4, 8, 7, 3).inputs, text.Sample(4, 8, 7, 4).inputs);
  EXPECT_NE(text.Sample(4, 8, 7, 3).inputs, text.Sample(4, 8, 8, 2).inputs);
}

TEST(TextData, TheShortestTextThatFitsASequenceIsSampled) {
  const TextData text = *TextData::Create("abcde");
  EXPECT_TRUE(text.CheckSequence(4).ok());
  EXPECT_THAT(text.Sample(100, 4, 1, 1).targets, Each(Lt(5)));
}

TEST(TextData, ATextNoLongerThanASequenceIsRefusedWithBothLengths) {
  const absl::Status status = TextData::Create("abcde")->CheckSequence(5);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("5 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("at least 6"));
}

TEST(TextData, ATextOfOneRepeatedByteIsRefused) {
  EXPECT_EQ(TextData::Create("aaaa").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TextData::Create("").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReadTextFile, ReturnsEveryByte) {
  const std::string path = ::testing::TempDir() + "/bytes";
  const std::string bytes("a\0\r\n\xff", 5);
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_EQ(*ReadTextFile(path), bytes);
}

TEST(ReadTextFile, MissingEmptyAndDirectoryAreErrorsThatNameThePath) {
  const std::string empty = ::testing::TempDir() + "/empty";
  std::ofstream(empty).close();
  for (const std::string& path : {empty, ::testing::TempDir() + "/missing", ::testing::TempDir()}) {
    const absl::StatusOr<std::string> text = ReadTextFile(path);
    ASSERT_FALSE(text.ok());
    EXPECT_THAT(std::string(text.status().message()), HasSubstr(path));
  }
}

TEST(ReadDefaultText, IsTheWholeBibleWithoutVerseNumbers) {
  const absl::StatusOr<std::string> text = ReadDefaultText();
  if (!text.ok()) GTEST_SKIP() << text.status();
  EXPECT_EQ(text->find("In the beginning God created the heaven and the earth.\n"), 0);
  EXPECT_EQ(text->find_first_of("0123456789"), std::string::npos);
  EXPECT_GT(text->size(), 4'000'000);
}

}  // namespace
}  // namespace pinion
