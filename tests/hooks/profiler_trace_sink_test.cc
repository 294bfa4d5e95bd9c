// Checks that LibTorch's profiler and observers see the sink's ranges.

#include "pinion/hooks/profiler_trace_sink.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_legacy.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

std::vector<std::string>& Observed() {
  static std::vector<std::string> observed;
  return observed;
}

std::unique_ptr<at::ObserverContext> Begin(const at::RecordFunction& function) {
  std::string what = std::string("begin ") + function.name();
  for (const c10::IValue& input : function.inputs()) what += " " + std::to_string(input.toInt());
  Observed().push_back(std::move(what));
  return nullptr;
}

void End(const at::RecordFunction& function, at::ObserverContext*) {
  Observed().push_back(std::string("end ") + function.name());
}

class ProfilerTraceSinkTest : public ::testing::Test {
 protected:
  ProfilerTraceSinkTest() { Observed().clear(); }
  ~ProfilerTraceSinkTest() override { at::clearCallbacks(); }

  static at::RecordFunctionCallback Callback() {
    return at::RecordFunctionCallback(Begin, End).scopes({at::RecordScope::USER_SCOPE});
  }

  ProfilerTraceSink sink_;
};

TEST_F(ProfilerTraceSinkTest, ObserversSeeRangesNestedWithTheirBytes) {
  at::addThreadLocalCallback(Callback().needsInputs(true));
  {
    const ScopedRange outer(&sink_, "pinion.pack", 4096);
    const ScopedRange inner(&sink_, "pinion.submit", 1);
  }
  EXPECT_THAT(Observed(), ElementsAre("begin pinion.pack 4096", "begin pinion.submit 1",
                                      "end pinion.submit", "end pinion.pack"));
}

TEST_F(ProfilerTraceSinkTest, AnObserverWithoutInterestInInputsSeesTheNames) {
  at::addThreadLocalCallback(Callback());
  { const ScopedRange range(&sink_, "pinion.pack", 4096); }
  EXPECT_THAT(Observed(), ElementsAre("begin pinion.pack", "end pinion.pack"));
}

TEST_F(ProfilerTraceSinkTest, ARangeThatBeganUnobservedEndsUnobserved) {
  sink_.BeginRange("early", 0);
  at::addThreadLocalCallback(Callback());
  { const ScopedRange range(&sink_, "late"); }
  sink_.EndRange();
  EXPECT_THAT(Observed(), ElementsAre("begin late", "end late"));
}

TEST_F(ProfilerTraceSinkTest, ARangeThatNobodyEnteredCannotBeLeft) {
  EXPECT_DEATH(sink_.EndRange(), "EndRange without BeginRange");
  EXPECT_DEATH(sink_.BeginRange(nullptr, 0), "a range has a name");
}

TEST_F(ProfilerTraceSinkTest, LibTorchsProfilerShowsTheOperatorsInsideARange) {
  namespace profiler = torch::autograd::profiler;
  profiler::enableProfilerLegacy(
      torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
  {
    const ScopedRange range(&sink_, "pinion.unpack", 16);
    at::ones({4});
  }
  const profiler::thread_event_lists lists = profiler::disableProfilerLegacy();
  std::vector<std::string> pushes;
  for (const std::vector<profiler::LegacyEvent>& list : lists) {
    for (const profiler::LegacyEvent& event : list) {
      if (event.kindStr() == "push") pushes.push_back(event.name());
    }
  }
  ASSERT_THAT(pushes, Contains("pinion.unpack"));
  ASSERT_THAT(pushes, Contains("aten::ones"));
  const auto range = std::find(pushes.begin(), pushes.end(), "pinion.unpack");
  EXPECT_NE(std::find(range, pushes.end(), "aten::ones"), pushes.end());
}

}  // namespace
}  // namespace pinion
