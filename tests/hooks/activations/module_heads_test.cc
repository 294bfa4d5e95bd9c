// Checks which parts of a module are heads. TRL finds them by the same names in the same order.

#include "pinion/hooks/activations/module_heads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Builds a module with submodules at these paths. "path=parameter" and "path=buffer" are tensors.
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
    // Registered in reverse, because the order of registration must not matter.
    EXPECT_THAT(HeadsIn(*Tree({names.rbegin(), names.rend()})), ElementsAre(names.front()));
  }
}

// trl_heads.py computed the expected heads with TRL's own file.
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

TEST(ModuleHeadsTest, ANameThatIsNoModulesEndsTheSearch) {
  EXPECT_THAT(HeadsIn(*Tree({"output=parameter", "lm_head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"output=buffer", "head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"lm_head=parameter", "head"})), IsEmpty());
  EXPECT_THAT(HeadsIn(*Tree({"decoder=buffer", "head"})), IsEmpty());
}

// torchtune's TiedLinear is no module in Python and has its head in `linear`. In C++ the registered
// object is a module, so all of it is the head.
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
  EXPECT_THAT(PathsOf(FindHeads(*Tree({"layers", "liger"}))), ElementsAre("liger"));
  EXPECT_THAT(log.text(), HasSubstr("no submodule is an output head"));
  EXPECT_THAT(log.text(), HasSubstr("Register it as `output`"));
  EXPECT_THAT(log.text(), HasSubstr("warn_if_no_head"));
}

TEST(ModuleHeadsTest, TheWarningCanBeSilencedAndIsNotGivenWhereThereIsAHead) {
  const CapturedLog log;
  FindHeads(*Tree({"layers"}), {.warn_if_no_head = false});
  EXPECT_THAT(PathsOf(FindHeads(*Tree({"lm_head"}))), ElementsAre("lm_head"));
  EXPECT_EQ(log.text(), "");
}

}  // namespace
}  // namespace pinion::testing
