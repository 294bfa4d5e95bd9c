// Compares TrlOffload with TRL itself: trl_log.py ran the same models with TRL and logged its
// actions in order.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/bench/peers/trl_offload.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"

namespace pinion::testing {
namespace {

using Events = std::vector<std::string>;

Events LoggedByTrl(const std::string& model) {
  std::ifstream file("tests/bench/peers/testdata/trl_log.json");
  return nlohmann::json::parse(file).at(model).get<Events>();
}

// Compares event by event; the first difference is reported with all events before it.
void ExpectSameEvents(const Events& expected, const Events& actual) {
  std::string before;
  for (size_t i = 0; i < std::min(expected.size(), actual.size()); ++i) {
    ASSERT_EQ(expected[i], actual[i]) << "event " << i << ", after" << before;
    before += "\n  " + expected[i];
  }
  EXPECT_EQ(expected.size(), actual.size()) << "after" << before;
}

enum class ScopeAround { kForward, kStep, kSteps };

class TrlLogTest : public ::testing::Test {
 protected:
  std::shared_ptr<TrlOffload> NewOffload(TrlOptions options) {
    options.log = [this](const std::string& event) { events_.push_back(event); };
    return std::make_shared<TrlOffload>(std::move(options), device_);
  }
  at::Tensor Ones(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const {
    return at::ones(sizes, at::TensorOptions(type).device(device_));
  }
  at::Tensor Parameter(at::IntArrayRef sizes) const { return Ones(sizes).requires_grad_(true); }

  void RunChain(ScopeAround around);

  EmuWorld world_;
  const c10::Device device_ = world_.device();
  Events events_;
};

at::Tensor Read(const at::Tensor& grad, const UnpackSaved& unpack) {
  unpack();
  return grad;
}

void TrlLogTest::RunChain(ScopeAround around) {
  std::vector<at::Tensor> weights;
  for (int layer = 0; layer < 8; ++layer) weights.push_back(Parameter({16, 16}));
  const auto offload = NewOffload({.parameters = weights});
  std::optional<TrlScope> scope;
  for (int step = 0; step < 2; ++step) {
    if (step == 0 || around != ScopeAround::kSteps) scope.emplace(offload);
    at::Tensor h = Ones({32, 16});
    for (const at::Tensor& weight : weights) h = at::tanh(at::mm(h, weight));
    if (around == ScopeAround::kForward) scope.reset();
    h.sum().backward();
    if (around == ScopeAround::kStep) scope.reset();
  }
}

TEST_F(TrlLogTest, OutputsThatAreSavedTwiceGoAndComeAsByTrl) {
  RunChain(ScopeAround::kStep);
  ExpectSameEvents(LoggedByTrl("chain, each step in a context"), events_);
}

TEST_F(TrlLogTest, AScopeAroundForwardAloneLetsGoOfItsStashAsTrls) {
  RunChain(ScopeAround::kForward);
  ExpectSameEvents(LoggedByTrl("chain, each forward in a context"), events_);
}

TEST_F(TrlLogTest, StepsInOneScopeFollowEachOtherAsByTrl) {
  RunChain(ScopeAround::kSteps);
  ExpectSameEvents(LoggedByTrl("chain, both steps in one context"), events_);
}

TEST_F(TrlLogTest, SizesParametersRepeatedSavesAndViewsAreTreatedAsByTrl) {
  const at::Tensor carrier = Parameter({16});
  const at::Tensor weight = Parameter({32, 32});
  const at::Tensor t = Ones({16, 32});
  const at::Tensor u = Ones({32, 24});
  const at::Tensor column = Ones({64, 1});
  const std::vector<at::Tensor> saved = {
      Ones({1023}, at::kByte),
      Ones({1024}, at::kByte),
      weight,
      weight.t(),
      t,
      t,
      t.slice(/*dim=*/1, 0, 16),
      t.slice(/*dim=*/0, 4),
      t.view(at::kInt),
      u.t(),
      column.expand({64, 32}),
      Ones({0, 4}),
      t,
      u,
      t.slice(/*dim=*/0, 4),
      column,
  };
  {
    const TrlScope scope(NewOffload({.parameters = {carrier, weight}}));
    at::Tensor y = carrier;
    for (const at::Tensor& tensor : saved) y = Probe(y, {tensor}, &Read);
    y.sum().backward();
  }
  ExpectSameEvents(LoggedByTrl("kinds"), events_);
}

TEST_F(TrlLogTest, WhatNodesReadIsFreedAsByTrlWhateverTheyDoWithIt) {
  const at::Tensor carrier = Parameter({16});
  const auto offload =
      NewOffload({.min_offload_size = 1, .max_fwd_stash_size = 2, .parameters = {carrier}});
  std::vector<at::Tensor> kept;
  const ProbeBackward keep = [&kept](const at::Tensor& grad, const UnpackSaved& unpack) {
    kept.push_back(unpack()[0]);
    return grad;
  };
  const ProbeBackward view = [](const at::Tensor&, const UnpackSaved& unpack) {
    return unpack()[0][0];
  };
  const ProbeBackward ignore = [](const at::Tensor& grad, const UnpackSaved&) { return grad; };
  for (int step = 0; step < 2; ++step) {
    std::vector<at::Tensor> t;
    for (int i = 0; i < 8; ++i) t.push_back(Ones({2, 16}));
    const TrlScope scope(offload);
    at::Tensor y = Probe(carrier, {t[0]}, view);
    y = Probe(y, {t[1], t[2]}, &Read);
    y = Probe(y, {t[3]}, keep);
    y = Probe(y, {t[1]}, &Read);
    y = Probe(y, {t[4]}, ignore);
    y = Probe(y, {t[5]}, &Read);
    y = Probe(y, {t[6]}, view);
    Probe(y, {t[7]}, &Read);
    y.sum().backward();
  }
  ExpectSameEvents(LoggedByTrl("readers"), events_);
}

}  // namespace
}  // namespace pinion::testing
