// The heads of a module: which of its parts they are, and that what their nodes save stays on the
// device. TRL finds them by the same names in the same order.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/no_offload_module.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---------------------------------------------------------------------------------- by their names

// A module with submodules by these paths, and by the beginnings of them. "path=parameter" and
// "path=buffer" are tensors.
std::shared_ptr<torch::nn::Module> Tree(const std::vector<std::string>& paths) {
  auto root = std::make_shared<torch::nn::Module>();
  for (const std::string& path : paths) {
    std::shared_ptr<torch::nn::Module> inner = root;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('.', begin), path.size());
      const std::string name = path.substr(begin, end - begin);
      const size_t tensor = name.find('=');
      if (tensor != std::string::npos) {
        const at::Tensor one = at::ones({1});
        name.ends_with("buffer") ? inner->register_buffer(name.substr(0, tensor), one)
                                 : inner->register_parameter(name.substr(0, tensor), one);
        break;
      }
      const auto children = inner->named_children();
      const auto* known = children.find(name);
      inner = known != nullptr
                  ? *known
                  : inner->register_module(name, std::make_shared<torch::nn::Module>());
      begin = end + 1;
    }
  }
  return root;
}

std::vector<std::string> PathsOf(const ModuleHeads& heads) {
  std::vector<std::string> paths;
  for (const ModuleHeads::Part& part : heads.parts) paths.push_back(part.path);
  return paths;
}

std::vector<std::string> HeadsIn(const torch::nn::Module& module) {
  return PathsOf(FindHeads(module, {.warn_if_no_head = false}));
}

TEST(ModuleHeadsTest, TheFirstNameOfTheListDecides) {
  std::vector<std::string> names = {
      "output", "lm_head", "decoder.output", "decoder.lm_head", "final_layer_norm", "ln_f", "head"};
  for (; !names.empty(); names.erase(names.begin())) {
    // Registered from the last to the first: that order says nothing.
    EXPECT_THAT(HeadsIn(*Tree({names.rbegin(), names.rend()})), ElementsAre(names.front()));
  }
}

// trl_heads.py has asked TRL's own file about the same models.
TEST(ModuleHeadsTest, OfRandomModelsTheyAreThoseThatTrlLeavesAlone) {
  std::ifstream file("tests/hooks/activations/testdata/trl_heads.json");
  const nlohmann::json models = nlohmann::json::parse(file);
  ASSERT_GE(models.size(), 200u);
  for (const nlohmann::json& model : models) {
    const CapturedLog log;
    const ModuleHeads heads = FindHeads(*Tree(model.at("names").get<std::vector<std::string>>()));
    EXPECT_EQ(PathsOf(heads), model.at("heads").get<std::vector<std::string>>()) << model;
    EXPECT_EQ(!log.text().empty(), model.at("warns").get<bool>()) << model;
  }
}

TEST(ModuleHeadsTest, AnOutputThatIsNoModuleEndsTheSearch) {
  EXPECT_THAT(HeadsIn(*Tree({"output=parameter", "lm_head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"output=buffer", "head"})), IsEmpty());
}

// torchtune's TiedLinear, which is no module in Python, has the head in `linear`. What is
// registered in C++ is a module, so the head is all of it.
TEST(ModuleHeadsTest, AnOutputWithALinearInsideIsTheHeadItself) {
  EXPECT_THAT(HeadsIn(*Tree({"output.linear"})), ElementsAre("output"));
}

TEST(ModuleHeadsTest, ADecoderWithoutAHeadEndsTheSearch) {
  EXPECT_THAT(HeadsIn(*Tree({"decoder.layers", "ln_f", "head"})), IsEmpty());
}

TEST(ModuleHeadsTest, ModuleIsUnwrappedOnce) {
  EXPECT_THAT(HeadsIn(*Tree({"module.lm_head"})), ElementsAre("module.lm_head"));
  EXPECT_THAT(HeadsIn(*Tree({"module.module.lm_head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"module.layers", "lm_head"})), IsEmpty());
}

TEST(ModuleHeadsTest, BaseModelIsUnwrappedOnlyBesidePeftConfig) {
  EXPECT_THAT(HeadsIn(*Tree({"base_model.lm_head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"base_model.lm_head", "peft_config"})),
              ElementsAre("base_model.lm_head"));
  EXPECT_THAT(HeadsIn(*Tree({"module.base_model.head", "module.peft_config"})),
              ElementsAre("module.base_model.head"));
  EXPECT_THAT(HeadsIn(*Tree({"base_model.lm_head", "peft_config=buffer"})),
              ElementsAre("base_model.lm_head"));
}

TEST(ModuleHeadsTest, EveryPathWithLigerInItIsOneInAnyCase) {
  const auto module = Tree({"lm_head", "layers.0.LigerSwiGLU.up", "layers.1.mlp", "xligerx"});
  EXPECT_THAT(HeadsIn(*module),
              ElementsAre("lm_head", "layers.0.LigerSwiGLU", "layers.0.LigerSwiGLU.up", "xligerx"));
}

TEST(ModuleHeadsTest, ThePatternsCanBeReplaced) {
  const auto module = Tree({"lm_head", "liger", "layers.0.Router"});
  HeadOptions options;
  options.name_patterns = {"ROUTER", "nothing"};
  EXPECT_THAT(PathsOf(FindHeads(*module, options)), ElementsAre("lm_head", "layers.0.Router"));
  options.name_patterns.clear();
  EXPECT_THAT(PathsOf(FindHeads(*module, options)), ElementsAre("lm_head"));
}

TEST(ModuleHeadsTest, AModuleWithoutAHeadIsWarnedOfWithTheRemedy) {
  const CapturedLog log;
  const ModuleHeads heads = FindHeads(*Tree({"layers", "liger"}));
  EXPECT_FALSE(heads.has_head);
  EXPECT_THAT(PathsOf(heads), ElementsAre("liger"));
  EXPECT_THAT(log.text(), HasSubstr("no submodule is an output head"));
  EXPECT_THAT(log.text(), HasSubstr("Register it as `output`"));
  EXPECT_THAT(log.text(), HasSubstr("warn_if_no_head"));
}

TEST(ModuleHeadsTest, TheWarningCanBeSilencedAndIsNotGivenWhereThereIsAHead) {
  const CapturedLog log;
  FindHeads(*Tree({"layers"}), {.warn_if_no_head = false});
  EXPECT_TRUE(FindHeads(*Tree({"lm_head"})).has_head);
  EXPECT_EQ(log.text(), "");
}

// ------------------------------------------------------------------------------- what they save

constexpr int64_t kWidth = 64;

class TwoLayersImpl : public torch::nn::Module {
 public:
  TwoLayersImpl()
      : body_(register_module("body", torch::nn::Linear(kWidth, kWidth))),
        head_(register_module("lm_head", torch::nn::Linear(kWidth, 4 * kWidth))) {}

  at::Tensor forward(const at::Tensor& x) {
    return at::mean(at::mul(head_->forward(at::gelu(body_->forward(x))), 0.5));
  }
  const at::Tensor& head_weight() const { return head_->weight; }

 private:
  torch::nn::Linear body_;
  torch::nn::Linear head_;
};
TORCH_MODULE(TwoLayers);

class OffloadHeads : public ::testing::Test {
 protected:
  explicit OffloadHeads(const OffloadOptions& options = SmallWindows(1))
      : world_(MachineOptions(), options) {
    model_->to(world_.device());
  }

  OffloadStats stats() { return world_.session()->GetStats(); }
  at::Tensor activation(int first = 0) { return Activation(carrier_, {32, kWidth}, first); }
  at::Tensor input() { return at::mul(activation(1), 0.01); }
  const at::Tensor& weight() { return model_->head_weight(); }

  // In a scope that leaves the heads alone, or in a plain one, or in none.
  enum class In { kHeads, kModule, kNothing };
  at::Tensor Loss(In in) {
    std::optional<OffloadScope> scope;
    if (in == In::kHeads) scope.emplace(world_.session(), *model_, heads_);
    if (in == In::kModule) scope.emplace(world_.session(), *model_);
    return model_->forward(input());
  }
  std::vector<at::Tensor> Gradients(In in) {
    Loss(in).backward();
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : model_->parameters()) gradients.push_back(parameter.grad().cpu());
    model_->zero_grad();
    return gradients;
  }
  void ExpectSameGradientsAsWithout() {
    const std::vector<at::Tensor> plain = Gradients(In::kNothing);
    const std::vector<at::Tensor> offloaded = Gradients(In::kHeads);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(SameBytes(plain[i], offloaded[i])) << i;
  }

  EmuWorld world_;
  TwoLayers model_;
  // Found before the model moves to the device, where its parameters have other storages.
  const ModuleHeads heads_ = FindHeads(*model_);
  at::Tensor carrier_ = at::ones({1}, at::TensorOptions(world_.device())).requires_grad_(true);
  std::vector<at::Tensor> seen_;
};

TEST_F(OffloadHeads, WhatTheHeadSavesStaysAndTheRestLeaves) {
  Loss(In::kModule);
  const OffloadStats all = stats();
  ASSERT_EQ(all.kept_head, 0u);
  const at::Tensor loss = Loss(In::kHeads);
  EXPECT_EQ(stats().kept_head, 1u) << "the layer's input";
  EXPECT_EQ(stats().offloaded - all.offloaded, all.offloaded - 1);
  EXPECT_EQ(stats().packed, stats().offloaded + stats().shared + stats().kept());
}

TEST_F(OffloadHeads, GradientsAreBitwiseTheSame) {
  ExpectSameGradientsAsWithout();
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_GT(stats().offloaded, 0u);
  EXPECT_GT(stats().evicted_bytes, 0u);
  EXPECT_GT(stats().fetched_bytes, 0u);
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, TheOrderInWhichANodeSavesDoesNotMatter) {
  for (int at = 0; at < 3; ++at) {
    SCOPED_TRACE(at);
    const OffloadStats before = stats();
    std::vector<at::Tensor> other;
    at::Tensor y;
    {
      const OffloadScope scope(world_.session(), *model_, heads_);
      std::vector<at::Tensor> saved = {activation(1), activation(2)};
      saved.insert(saved.begin() + at, weight().t());
      y = Observe(carrier_, saved, &seen_);
      saved.clear();
      y = Observe(y, {activation(3)}, &other);
    }
    EXPECT_EQ(stats().kept_head - before.kept_head, 2u);
    EXPECT_EQ(stats().offloaded - before.offloaded, 1u) << "the second node's";
    y.backward();
    EXPECT_TRUE(SameBytes(seen_[at == 0 ? 1 : 0], ActivationValues({32, kWidth}, 1)));
    EXPECT_EQ(stats().fetched_bytes - before.fetched_bytes, 32u * kWidth * 4);
  }
}

TEST_F(OffloadHeads, ATensorThatTheNodeBeforeItHasSavedIsNotCopiedEither) {
  at::Tensor y;
  std::vector<at::Tensor> seen_before;
  {
    const OffloadScope scope(world_.session(), *model_, heads_);
    const at::Tensor hidden = activation(1);
    y = Observe(carrier_, {hidden}, &seen_before);
    y = Observe(y, {hidden, weight()}, &seen_);
  }
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_EQ(stats().shared, 1u);
  EXPECT_EQ(world_.session()->GetEngineStats(0).d2h.submitted_bytes, 0u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_before[0], ActivationValues({32, kWidth}, 1)));
}

TEST_F(OffloadHeads, ATensorThatHasLeftBeforeStaysOnTheDeviceAsLongAsTheHeadNeedsIt) {
  at::Tensor y;
  std::vector<at::Tensor> seen_first;
  std::vector<at::Tensor> seen_other;
  {
    const OffloadScope scope(world_.session(), *model_, heads_);
    at::Tensor hidden = activation(1);
    y = Observe(carrier_, {hidden}, &seen_first);
    y = Observe(y, {activation(2)}, &seen_other);
    y = Observe(y, {hidden, weight()}, &seen_);
  }
  ASSERT_EQ(stats().offloaded, 2u);
  ASSERT_EQ(stats().evicted_bytes, 2u * 32 * kWidth * 4);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, kWidth}, 1)));
  EXPECT_TRUE(SameBytes(seen_first[0], ActivationValues({32, kWidth}, 1)));
  EXPECT_GE(stats().reused_on_device, 1u) << "the head's";
  seen_.clear();
  seen_first.clear();
  seen_other.clear();
  y.reset();
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, AutocastsCopyOfItsWeightTellsItToo) {
  const c10::DeviceType type = world_.device().type();
  const auto loss_under_autocast = [&](In in) {
    at::autocast::set_autocast_enabled(type, true);
    at::autocast::set_autocast_dtype(type, at::kBFloat16);
    at::autocast::increment_nesting();
    const at::Tensor loss = Loss(in);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type, false);
    return loss;
  };
  loss_under_autocast(In::kModule);
  const OffloadStats all = stats();
  const at::Tensor loss = loss_under_autocast(In::kHeads);
  EXPECT_EQ(stats().kept_head, 2u) << "the layer's input and the cast of its weight";
  loss.backward();
  EXPECT_GT(stats().fetched_bytes, all.fetched_bytes);
}

TEST_F(OffloadHeads, AChangeOfWhatItHasSavedRaisesWhatAutogradRaises) {
  for (const bool weight_first : {false, true}) {
    const at::Tensor hidden = activation(1);
    std::vector<at::Tensor> saved = {hidden, weight()};
    if (weight_first) std::swap(saved[0], saved[1]);
    at::Tensor y;
    {
      const OffloadScope scope(world_.session(), *model_, heads_);
      y = Observe(carrier_, saved, &seen_);
    }
    hidden.detach().add_(1);
    EXPECT_THAT([&] { y.backward(); },
                ::testing::Throws<c10::Error>(::testing::Property(
                    &c10::Error::what, HasSubstr("has been modified by an inplace operation"))));
  }
  EXPECT_EQ(stats().kept_head, 2u);
}

// The embedding is a function of the head's weight alone.
TEST_F(OffloadHeads, ATiedEmbeddingIsNoHead) {
  torch::nn::Embedding embedding(kWidth, kWidth);
  torch::nn::Module module;
  module.register_module("lm_head", embedding);
  module.to(world_.device());
  const at::Tensor tokens = at::zeros({32}, at::TensorOptions(world_.device()).dtype(at::kLong));
  at::Tensor y;
  {
    const OffloadScope scope(world_.session(), module, FindHeads(module));
    y = at::gelu(at::embedding(embedding->weight, tokens));
    EXPECT_EQ(stats().kept_head, 0u);
    y = at::mm(y, embedding->weight.t());
  }
  EXPECT_EQ(stats().kept_head, 1u) << "what goes into the product";
  EXPECT_EQ(stats().offloaded, 1u) << "what goes into gelu";
  at::mean(y).backward();
  EXPECT_GT(stats().fetched_bytes, 0u);
}

TEST_F(OffloadHeads, AnExceptionInTheHeadLeavesNothingBehind) {
  EXPECT_THROW(
      {
        const OffloadScope scope(world_.session(), *model_, heads_);
        const at::Tensor y = Observe(carrier_, {activation(1), weight()}, &seen_);
        throw std::runtime_error("in the head");
      },
      std::runtime_error);
  EXPECT_EQ(stats().kept_head, 1u);
  ExpectSameGradientsAsWithout();
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, AScopeWithoutHeadsInsideOffloadsThem) {
  at::Tensor loss;
  {
    const OffloadScope scope(world_.session(), *model_, heads_);
    loss = Loss(In::kModule);
  }
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// Its input has no gradient to come, so the node does not save the weight.
TEST_F(OffloadHeads, AHeadWhoseInputNeedsNoGradientIsNotKnown) {
  torch::nn::Linear head(kWidth, kWidth);
  head->to(world_.device());
  at::Tensor y;
  {
    torch::nn::Module module;
    module.register_module("head", head);
    const OffloadScope scope(world_.session(), module, FindHeads(module));
    y = head->forward(activation().detach());
  }
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_EQ(stats().offloaded, 1u);
}

TEST(OffloadHeadsErrors, TensorsThatFindNoHostMemoryAreKeptForThatReason) {
  OffloadOptions options = SmallWindows(1);
  options.allocator.max_locked_bytes = options.allocator.segment_bytes;
  EmuWorld world(MachineOptions(), options);
  TwoLayers model;
  model->to(world.device());
  const ModuleHeads heads = FindHeads(*model);
  const at::Tensor carrier = at::ones({1}, at::TensorOptions(world.device())).requires_grad_(true);
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world.session(), *model, heads);
    y = Observe(carrier, {Activation(carrier, {64, 8192})}, &seen);  // 2 MiB
    y = Observe(y, {Activation(carrier, {64, 64}), model->head_weight()}, &seen);
  }
  EXPECT_EQ(world.session()->GetStats().kept_no_host_memory, 1u);
  EXPECT_EQ(world.session()->GetStats().kept_head, 1u);
  y.backward();
}

OffloadOptions Planned() {
  OffloadOptions options = SmallWindows();
  options.eviction_window_bytes = OffloadOptions::kAutoWindow;
  options.prefetch_window_bytes = OffloadOptions::kAutoWindow;
  options.memory_target_bytes = OffloadOptions::kAutoTarget;
  return options;
}

class PlannedOffloadHeads : public OffloadHeads {
 protected:
  PlannedOffloadHeads() : OffloadHeads(Planned()) {}
};

TEST_F(PlannedOffloadHeads, WithAMemoryTargetThePlanDecides) {
  for (int step = 0; step < 4; ++step) ExpectSameGradientsAsWithout();
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_GT(stats().kept_as_planned, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// -------------------------------------------------------------------------------- the wrapper

TEST_F(OffloadHeads, WhatAWrappedModuleSavesStays) {
  torch::nn::Linear first(kWidth, kWidth);
  torch::nn::Linear last(kWidth, kWidth);
  torch::nn::Sequential plain(first, torch::nn::GELU(), last);
  torch::nn::Sequential wrapped(first, nn::NoOffload(torch::nn::GELU()), last);
  plain->to(world_.device());
  const at::Tensor x = input();
  const auto packed_by = [&](torch::nn::Sequential& model) {
    const uint64_t before = stats().packed;
    at::Tensor loss;
    {
      const OffloadScope scope(world_.session(), *model);
      loss = at::mean(model->forward(x));
    }
    loss.backward();
    return stats().packed - before;
  };
  const uint64_t plain_packs = packed_by(plain);
  const at::Tensor gradient = plain->parameters()[0].grad().cpu();
  plain->zero_grad();
  EXPECT_EQ(packed_by(wrapped), plain_packs - 1) << "the activation's input";
  EXPECT_TRUE(SameBytes(gradient, wrapped->parameters()[0].grad().cpu()));
  EXPECT_GT(stats().fetched_bytes, 0u);
}

TEST_F(OffloadHeads, AWrapperMayBeAroundASequentialAndHasItsParameters) {
  torch::nn::Sequential inner(torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth));
  nn::NoOffload wrapped(inner);
  EXPECT_TRUE(wrapped->named_parameters().contains("wrapped.1.weight"));
  wrapped->to(world_.device());
  const at::Tensor x = input();
  const OffloadScope scope(world_.session());
  const uint64_t before = stats().packed;
  EXPECT_TRUE(SameBytes(wrapped->forward(x), inner->forward(x)));
  EXPECT_EQ(stats().packed - before, 3u) << "those outside: GELU's input, Linear's and its weight";
}

}  // namespace
}  // namespace pinion::testing
