// Checks which casts of parameters count as reproducible, so that backward may recast them.

#include "pinion/hooks/plan/parameter_cast.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <malloc.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion::testing {
namespace {

at::Tensor NewParameter() { return at::randn({8, 8}).requires_grad_(true); }
at::Tensor Cast(const at::Tensor& parameter) { return parameter.to(at::kBFloat16); }

TEST(CastSources, KnowAParameterInTheScopesAfterThatWhichHasSeenIt) {
  CastSources sources;
  const at::Tensor parameter = NewParameter();
  const CastNotes first = sources.Note();
  EXPECT_EQ(sources.Find(Cast(parameter), first, CurrentNode()), nullptr);
  const CastNotes second = sources.Note();
  const NodeId begin = CurrentNode();
  const auto found = sources.Find(Cast(parameter).t(), second, begin);
  ASSERT_NE(found, nullptr);
  EXPECT_TRUE(found->parameter().is_same(parameter));
  EXPECT_EQ(sources.Find(Cast(parameter), first, begin), nullptr) << "this one still runs";
}

TEST(CastSources, TakeNoCastThatIsOlderThanTheScope) {
  CastSources sources;
  const at::Tensor parameter = NewParameter();
  const at::Tensor older = Cast(parameter);
  sources.Find(older, CastNotes(), CurrentNode());
  const NodeId begin = CurrentNode();
  EXPECT_EQ(sources.Find(older, sources.Note(), begin), nullptr);
  EXPECT_NE(sources.Find(Cast(parameter), sources.Note(), begin), nullptr);
}

TEST(CastSources, TakeNoCastOfWhatHasChangedSinceTheScopeBegan) {
  CastSources sources;
  const at::Tensor parameter = NewParameter();
  sources.Find(Cast(parameter), CastNotes(), CurrentNode());
  const CastNotes notes = sources.Note();
  const NodeId begin = CurrentNode();
  {
    const c10::NoGradGuard no_grad;
    parameter.add_(1);
  }
  EXPECT_EQ(sources.Find(Cast(parameter), notes, begin), nullptr);
}

TEST(CastSources, ForgetParametersThatHaveDied) {
  CastSources sources;
  at::Tensor parameter = NewParameter();
  sources.Find(Cast(parameter), CastNotes(), CurrentNode());
  const WeakTensorImpl ours(parameter.getIntrusivePtr());
  parameter.reset();
  ASSERT_TRUE(ours.expired());
  EXPECT_EQ(ours.weak_use_count(), 2u);
  sources.Note();
  EXPECT_EQ(ours.weak_use_count(), 1u);
}

int64_t HeapBytes() { return static_cast<int64_t>(mallinfo2().uordblks + mallinfo2().hblkhd); }

TEST(ParameterState, LeavesNoMemoryInUse) {
  constexpr int64_t kStates = 4096;
  // Both lists stay: no storage has the address of an earlier one.
  const auto parameters = [] {
    std::vector<at::Tensor> all;
    for (int64_t n = 0; n < kStates; ++n) all.push_back(at::empty({1}));
    return all;
  };
  const std::vector<at::Tensor> early = parameters();
  const std::vector<at::Tensor> late = parameters();
  const auto make_and_drop = [](const std::vector<at::Tensor>& all) {
    std::vector<ParameterState> states;
    for (const at::Tensor& parameter : all) states.emplace_back(parameter);
  };
  make_and_drop(early);  // grows what is used again
  const int64_t before = HeapBytes();
  make_and_drop(late);
  EXPECT_LT(HeapBytes() - before, kStates * 8);
}

}  // namespace
}  // namespace pinion::testing
