#include "pinion/allocator/base/check.h"

#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::MatchesRegex;

TEST(CheckTest, ALineOfTheLogNamesItsFileWithoutTheFolders) {
  std::vector<std::string> lines;
  LogSink previous =
      SetLogSink([&](LogSeverity, const std::string& message) { lines.push_back(message); });
  PINION_LOG(kWarning) << "text " << 7;
  SetLogSink(std::move(previous));
  EXPECT_THAT(lines, ElementsAre(MatchesRegex("check_test.cc:[0-9]+: text 7")));
}

TEST(CheckTest, WithoutASinkTheLogIsStandardError) {
  ::testing::internal::CaptureStderr();
  PINION_LOG(kWarning) << "text";
  PINION_LOG(kError) << "text";
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              MatchesRegex("pinion W check_test.cc:[0-9]+: text\n"
                           "pinion E check_test.cc:[0-9]+: text\n"));
}

TEST(CheckDeathTest, AFailedCheckSaysWhereAndWhy) {
  EXPECT_EXIT(PINION_CHECK(1 > 2) << "so", ::testing::KilledBySignal(SIGABRT),
              "pinion: check failed at check_test.cc:[0-9]+: 1 > 2 so");
}

}  // namespace
}  // namespace pinion
