// LibTorch's everyday idioms on the parameters of a model whose weights are streamed: each has the
// effect that it has on a resident model, or throws and names the parameter.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace parameter_idioms {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Tensors = std::vector<Tensor>;

// A program's model: resident, or with streamed weights.
struct Model {
  Net net{3};
  std::unique_ptr<WeightOffloader> weights;  // null: resident
  c10::Device device{at::kCPU};

  // A gradient with a graph and its parameter keep each other, which LibTorch warns of.
  ~Model() {
    for (const Tensor& p : parameters()) p.mutable_grad() = Tensor();
  }
  Tensors parameters() const { return net->parameters(); }
  Tensor parameter(size_t index = 0) const { return net->parameters()[index]; }
  std::string Name(size_t index) const { return net->named_parameters()[index].key(); }
  // What an optimizer is made over.
  Tensors trained() const { return weights ? weights->host_parameters() : net->parameters(); }
  Tensor Loss(double seed) { return net->forward(Input(seed).to(device)).pow(2).mean(); }
  void Backward(double seed) { Loss(seed).backward(); }
  void Wait() const {
    if (weights) weights->WaitForGradients();
  }
  void Step(const std::function<void()>& step) const { weights ? weights->Step(step) : step(); }
  Tensors Gradients() const {
    Wait();
    Tensors gradients;
    for (const Tensor& tensor : trained()) {
      gradients.push_back(tensor.grad().defined() ? tensor.grad().detach().cpu().clone()
                                                  : Tensor());
    }
    return gradients;
  }
};

using Program = std::function<void(Model&)>;

class ParameterIdiomsTest : public ::testing::Test {
 protected:
  ParameterIdiomsTest() : world_(MachineOptions(), SmallWindows()) {}

  void Attach(Model& model, const WeightOptions& options = {.tier = SmallTier()}) {
    auto weights = WeightOffloader::Attach(*model.net, world_.device(), world_.backend(), options);
    ASSERT_TRUE(weights.ok()) << weights.status();
    model.weights = *std::move(weights);
    model.device = world_.device();
  }
  // `before` is done to the model on the host.
  Tensors Resident(
      const Program& program, const Program& before = [](Model&) {}) {
    Model model;
    before(model);
    model.net->to(world_.device());
    model.device = world_.device();
    program(model);
    return model.Gradients();
  }
  // Streamed weights in every way in which gradients travel have the gradients of resident ones.
  void ExpectAsResident(
      const Program& program, const Program& before = [](Model&) {}) {
    const Tensors expected = Resident(program, before);
    const WeightOptions ways[] = {{.tier = SmallTier()},
                                  {.tier = SmallTier(), .window_bytes = 100 * kUnitBytes},
                                  {.tier = SmallTier(), .gradients_stay = true}};
    for (const WeightOptions& way : ways) {
      SCOPED_TRACE(&way - ways);
      Model model;
      before(model);
      Attach(model, way);
      program(model);
      const Tensors actual = model.Gradients();
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "parameter " << i;
        if (!expected[i].defined()) continue;
        EXPECT_EQ(actual[i].dtype(), expected[i].dtype()) << "parameter " << i;
        // Of gradients that stay, those that have left and those that came since are summed apart.
        EXPECT_TRUE(way.gradients_stay ? at::allclose(actual[i], expected[i], 1e-5, 1e-8)
                                       : AsOnCpu(actual[i], expected[i]))
            << "parameter " << i;
      }
    }
  }

  EmuWorld world_;
};

struct Idiom {
  std::string name;
  Program use;
};

std::vector<Idiom> WaysToZero() {
  const auto over = [](const Tensors& tensors, bool set_to_none) {
    torch::optim::AdamW(tensors).zero_grad(set_to_none);
  };
  return {
      {"zero_grad()", [](Model& m) { m.net->zero_grad(); }},
      {"zero_grad(false)", [](Model& m) { m.net->zero_grad(/*set_to_none=*/false); }},
      {"of an optimizer of parameters()", [=](Model& m) { over(m.parameters(), true); }},
      {"the same, not to none", [=](Model& m) { over(m.parameters(), false); }},
      {"of an optimizer", [=](Model& m) { over(m.trained(), true); }},
      {"of an optimizer, not to none", [=](Model& m) { over(m.trained(), false); }},
      {"mutable_grad() = Tensor()",
       [](Model& m) {
         for (const Tensor& p : m.parameters()) p.mutable_grad() = Tensor();
       }},
      {"one grad().zero_()", [](Model& m) { m.parameter(2).grad().zero_(); }},
      {"one mutable_grad().reset()", [](Model& m) { m.parameter(2).mutable_grad().reset(); }},
  };
}

Program Backwards(const std::vector<double>& seeds) {
  return [seeds](Model& m) {
    for (const double seed : seeds) m.Backward(seed);
  };
}

TEST_F(ParameterIdiomsTest, GradientsThatAreZeroedAreZeroOnTheHost) {
  for (const Idiom& zero : WaysToZero()) {
    SCOPED_TRACE(zero.name);
    for (const bool waits : {true, false}) {
      ExpectAsResident([&](Model& m) {
        m.Backward(0);
        if (waits) m.Wait();
        zero.use(m);
      });
      ExpectAsResident([&](Model& m) {
        for (const double seed : {0, 1, 2}) {
          m.Backward(seed);
          if (waits) m.Wait();
          zero.use(m);
          m.Backward(seed + 10);
        }
      });
    }
  }
}

// As a branch, or an expert that no token chose. The norm of all gradients must not count it.
TEST_F(ParameterIdiomsTest,
       AGradientThatWasZeroedStaysSoWhereTheNextBackwardLeavesItsParameterOut) {
  for (const Idiom& zero : WaysToZero()) {
    SCOPED_TRACE(zero.name);
    for (const bool of_parameters : {true, false}) {
      ExpectAsResident([&](Model& m) {
        m.Backward(0);
        m.Step([] {});
        zero.use(m);
        at::linear(Input(1).to(m.device), m.parameter()).pow(2).mean().backward();
        torch::nn::utils::clip_grad_norm_(of_parameters ? m.parameters() : m.trained(), 1e-3);
      });
    }
  }
}

TEST_F(ParameterIdiomsTest, WhatChangesAGradientChangesItOnTheHost) {
  const std::vector<Idiom> idioms = {
      {"mul_", [](Model& m) { m.parameter().grad().mul_(0.5); }},
      {"data().mul_", [](Model& m) { m.parameter().grad().data().mul_(0.5); }},
      {"a view's fill_", [](Model& m) { m.parameter().grad().t()[3].slice(0, 2, 9).fill_(7); }},
      {"a view's zero_", [](Model& m) { m.parameter().grad().t()[3].zero_(); }},
      {"add_ of a parameter",
       [](Model& m) { m.parameter().mutable_grad().add_(m.parameter().detach(), 0.1); }},
      {"add_ of a tensor that changes",
       [](Model& m) {
         Tensor noise = at::ones_like(m.parameter());
         m.parameter().mutable_grad().add_(noise);
         noise.zero_();
       }},
      {"another tensor, which changes",
       [](Model& m) {
         Tensor other = at::ones_like(m.parameter());
         m.parameter().mutable_grad() = other;
         m.Wait();
         other = at::ones_like(other);
       }},
      {"a tensor of the host",
       [](Model& m) {
         const Tensor other = at::ones({kWidth, kWidth});
         m.parameter().mutable_grad() = m.weights ? other : other.to(m.device);
         m.Wait();
       }},
      {"the host copy's, or its own",
       [](Model& m) {
         m.Wait();
         m.trained()[0].mutable_grad() = at::ones_like(m.trained()[0]);
       }},
      {"another parameter's",
       [](Model& m) { m.parameter(0).mutable_grad() = m.parameter(2).grad().clone(); }},
      {"clip_grad_norm_",
       [](Model& m) { torch::nn::utils::clip_grad_norm_(m.parameters(), 0.01); }},
      {"clip_grad_value_",
       [](Model& m) { torch::nn::utils::clip_grad_value_(m.parameters(), 1e-4); }},
  };
  for (const Idiom& idiom : idioms) {
    SCOPED_TRACE(idiom.name);
    for (const bool waits : {true, false}) {
      ExpectAsResident([&](Model& m) {
        const at::NoGradGuard no_grad;
        for (const double seed : {0, 1}) {
          {
            const at::AutoGradMode grad(true);
            m.Backward(seed);
          }
          if (waits) m.Wait();
          idiom.use(m);
        }
        const at::AutoGradMode grad(true);
        m.Backward(2);
      });
    }
  }
}

TEST_F(ParameterIdiomsTest, AParametersGradientReadsAsThatOfAResidentOne) {
  const auto read = [](Model& m, Tensors& seen) {
    for (const double seed : {0, 1}) {
      EXPECT_EQ(m.parameter().grad().defined(), seed > 0);
      m.Backward(seed);
      for (const Tensor& p : m.parameters()) {
        ASSERT_TRUE(p.grad().defined());
        EXPECT_EQ(p.grad().device(), p.device());
        seen.push_back(p.grad().norm().cpu());
        seen.push_back(p.grad().view({-1}).cpu().clone());
      }
    }
  };
  Tensors expected, actual;
  Resident([&](Model& m) { read(m, expected); });
  for (const bool stay : {false, true}) {
    Model model;
    Attach(model, {.tier = SmallTier(), .gradients_stay = stay});
    actual.clear();
    read(model, actual);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(AsOnCpu(actual[i], expected[i])) << i;
  }
}

TEST_F(ParameterIdiomsTest, AHostCopysGradientReadsWholeThoughSomeOfItIsOnItsWay) {
  Model model;
  Attach(model);
  const Tensors expected = Resident(Backwards({0, 1}));
  model.Backward(0);
  model.Wait();
  model.Backward(1);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Tensor gradient = model.trained()[i].grad();
    EXPECT_TRUE(gradient.is_cpu());
    EXPECT_TRUE(AsOnCpu(gradient.clone(), expected[i]));
  }
}

// Nothing but Put and WaitForGradients adds what has arrived, so that what is seen is exact.
TEST_F(ParameterIdiomsTest, WhatWasTakenFromAHostCopysGradientIsOldUntilSomebodyWaits) {
  const Tensors first = Resident(Backwards({0})), sum = Resident(Backwards({0, 1}));
  for (const bool stay : {false, true}) {
    SCOPED_TRACE(stay);
    Model model;
    Attach(model, {.tier = SmallTier(), .gradients_stay = stay});
    model.Backward(0);
    model.Wait();
    const Tensor taken = model.trained()[0].grad();
    model.Backward(1);
    EXPECT_TRUE(AsOnCpu(taken, first[0])) << "the layer whose gradient is the last to leave";
    const Tensor anew = model.trained()[0].grad();
    EXPECT_THAT(ErrorOf([&] { anew.data_ptr<float>(); }), HasSubstr("not allocated yet"));
    EXPECT_TRUE(AsOnCpu(anew.clone(), sum[0])) << "an operator waits";
    model.Wait();
    EXPECT_TRUE(AsOnCpu(taken, sum[0]));
    EXPECT_EQ(model.trained()[0].grad().data_ptr<float>(), taken.data_ptr<float>());
  }
}

TEST_F(ParameterIdiomsTest, AGradientThatTheHostIsGivenIsItsParameters) {
  Model model;
  Attach(model);
  Tensor master = model.trained()[0];
  master.mutable_grad() = at::ones_like(master);
  model.Wait();
  ASSERT_TRUE(model.parameter().grad().defined());
  EXPECT_EQ(model.parameter().grad().sum().item<float>(), kWidth * kWidth);
  model.net->zero_grad();
  model.Wait();
  EXPECT_FALSE(master.grad().defined());
}

TEST_F(ParameterIdiomsTest, AGradientThatAParameterIsGivenAfterTheHostsResetIsAddedTo) {
  ExpectAsResident([](Model& m) {
    m.Backward(0);
    torch::optim::AdamW(m.trained()).zero_grad();
    m.parameter().mutable_grad() = at::ones({kWidth, kWidth}, at::TensorOptions(m.device));
    m.Backward(1);
  });
}

// Buckets, as of DDP and Megatron. The last bias is the first to have a gradient.
TEST_F(ParameterIdiomsTest, AGradientThatBackwardAddsToABufferThatTheProgramKeepsIsNamed) {
  const Tensors once = Resident(Backwards({0})), twice = Resident(Backwards({0, 0}));
  for (const size_t index : {0, 5}) {
    for (const bool is_view : {true, false}) {
      for (const bool stay : {true, false}) {
        SCOPED_TRACE(::testing::Message() << index << is_view << stay);
        Model model;
        Attach(model, {.tier = SmallTier(), .gradients_stay = stay});
        const Tensor parameter = model.parameter(index);
        const Tensor buffer = at::zeros(is_view ? parameter.numel() : parameter.sizes(),
                                        at::TensorOptions(model.device));
        parameter.mutable_grad() = is_view ? buffer.view_as(parameter) : buffer;
        model.Backward(0);
        for (const std::function<void()>& call :
             std::vector<std::function<void()>>{[&] { model.Step([] {}); }, [&] { model.Wait(); },
                                                [&] { model.weights->ClipGradNorm(1); }}) {
          EXPECT_THAT(ErrorOf(call), AllOf(HasSubstr(model.Name(index)), HasSubstr("clone()")));
        }
        EXPECT_TRUE(AsOnCpu(buffer.cpu().view_as(parameter), once[index])) << "nothing is lost";
        const Tensor summed = parameter.grad().clone();
        parameter.mutable_grad() = summed;
        EXPECT_EQ(ErrorOf([&] { model.Wait(); }), "no error") << "backward adds to another one";
        model.Backward(0);
        EXPECT_TRUE(AsOnCpu(model.Gradients()[index], twice[index]));
      }
    }
  }
}

TEST_F(ParameterIdiomsTest, AGradientWhoseBufferTheProgramChangesAfterItWasTakenIsNamed) {
  for (const bool before_attach : {true, false}) {
    SCOPED_TRACE(before_attach);
    Model model;
    model.net->to(world_.device());
    if (!before_attach) Attach(model);
    const Tensor parameter = model.parameter();
    Tensor buffer = at::zeros({parameter.numel()}, parameter.options());
    parameter.mutable_grad() = buffer.view_as(parameter);
    if (before_attach) Attach(model);
    model.Wait();
    buffer.zero_();
    model.Backward(0);
    EXPECT_THAT(ErrorOf([&] { model.Step([] {}); }),
                AllOf(HasSubstr(model.Name(0)), HasSubstr("clone()")));
    model.net->zero_grad();
    buffer.zero_();
    EXPECT_EQ(ErrorOf([&] { model.Step([] {}); }), "no error");
  }
}

TEST_F(ParameterIdiomsTest, AGradientThatIsSetAnewOrThatNobodyElseHasIsAsThatOfAResidentOne) {
  const auto gradients = [](Model& m, double seed) {
    return torch::autograd::grad({m.Loss(seed)}, m.parameters());
  };
  const auto set = [](Model& m, const Tensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) m.parameter(i).mutable_grad() = tensors[i];
  };
  const std::vector<Idiom> idioms = {
      {"torch::autograd::grad",
       [=](Model& m) {
         for (const double seed : {0, 1}) {
           const Tensors now = gradients(m, seed);
           set(m, now);
           m.Step([] {});
         }
       }},
      {"a buffer that is set in each step",
       [=](Model& m) {
         const Tensors buffers = gradients(m, 0);
         for (const double seed : {1, 2}) {
           const Tensors now = gradients(m, seed);
           for (size_t i = 0; i < now.size(); ++i) buffers[i].copy_(now[i]);
           set(m, buffers);
           m.Step([] {});
         }
       }},
      {"a buffer whose gradient is forgotten",
       [=](Model& m) {
         Tensors buffers;
         for (const Tensor& p : m.parameters()) {
           buffers.push_back(at::ones(p.sizes(), at::TensorOptions(m.device)));
         }
         for (const double seed : {1, 2}) {
           set(m, buffers);
           m.Step([] {});
           torch::optim::AdamW(m.trained()).zero_grad();
           for (const Tensor& buffer : buffers) buffer.mul_(2);
           m.Backward(seed);
           m.Step([] {});
         }
       }},
      {"a view of a temporary",
       [](Model& m) {
         m.parameter().mutable_grad() =
             at::ones({kWidth * kWidth}, at::TensorOptions(m.device)).view({kWidth, kWidth});
         m.Backward(0);
         m.Backward(1);
       }},
      {"a view that backward has made, of what the program keeps",
       [](Model& m) {
         Tensor kept;
         const Tensor view = m.parameter(1).unsqueeze(0);
         view.register_hook([&](const Tensor& gradient) { kept = gradient; });
         (view * 3).pow(2).sum().backward();
         m.Backward(1);
         EXPECT_TRUE(kept.defined());
       }},
  };
  for (const Idiom& idiom : idioms) {
    SCOPED_TRACE(idiom.name);
    ExpectAsResident(idiom.use);
  }
}

// The error's remedy for buckets: memory of the host.
TEST_F(ParameterIdiomsTest, GradientsInABufferOfTheHostAreAsThoseOfAResidentModel) {
  ExpectAsResident([](Model& m) {
    int64_t count = 0;
    for (const Tensor& p : m.parameters()) count += p.numel();
    Tensor buffer = at::zeros({count}, m.trained()[0].detach().options());
    int64_t begin = 0;
    for (const Tensor& tensor : m.trained()) {
      tensor.mutable_grad() = buffer.narrow(0, begin, tensor.numel()).view_as(tensor);
      begin += tensor.numel();
    }
    for (const double seed : {0, 1, 2}) {
      buffer.zero_();
      m.Backward(seed);
      m.Wait();
      buffer.div_(3);
      m.Step([] {});
    }
  });
}

TEST_F(ParameterIdiomsTest, AGradientThatWasForgottenIsNamedByWhoReadsIt) {
  Model model;
  Attach(model);
  model.Backward(0);
  const Tensor before = model.parameter().grad();
  model.net->zero_grad();
  model.Backward(1);
  EXPECT_THAT(ErrorOf([&] { before.norm(); }),
              AllOf(HasSubstr("blocks.0.linear.weight"), HasSubstr("clone()")));
  model.Wait();
  for (Tensor master : model.trained()) master.mutable_grad() = Tensor();
  EXPECT_THAT(ErrorOf([&] { model.parameter().grad().norm(); }),
              AllOf(HasSubstr("blocks.0.linear.weight"), HasSubstr("zero_grad")));
  model.Wait();
  EXPECT_FALSE(model.parameter().grad().defined()) << "as the host's copy has it";
}

TEST_F(ParameterIdiomsTest, WhatIsUnfrozenIsTrainedAndWhatIsFrozenIsNot) {
  const auto freeze = [](Model& m, bool is_frozen) {
    for (Tensor& p : m.parameters()) p.requires_grad_(!is_frozen);
    m.parameter(4).requires_grad_(true);
  };
  for (const bool tells_masters : {true, false}) {
    for (const bool begins_frozen : {true, false}) {
      SCOPED_TRACE(begins_frozen);
      // SGD goes on with the gradients that it finds.
      const auto train = [&](Model& m) {
        torch::optim::SGD optimizer(m.trained(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 6; ++step) {
          if (step == 2 || step == 4) {
            const bool is_frozen = begins_frozen == (step == 4);
            freeze(m, is_frozen);
            if (tells_masters && m.weights) {
              for (size_t i = 0; i < m.trained().size(); ++i) {
                m.trained()[i].requires_grad_(m.parameter(i).requires_grad());
              }
            }
          }
          m.Backward(step);
          m.Step([&] { optimizer.step(); });
          if (step != 3) optimizer.zero_grad();
        }
        m.Backward(6);
        for (size_t i = 0; i < m.trained().size(); ++i) {
          EXPECT_EQ(m.trained()[i].requires_grad(), m.parameter(i).requires_grad());
        }
      };
      ExpectAsResident(train, [&](Model& m) { freeze(m, begins_frozen); });
    }
  }
}

TEST_F(ParameterIdiomsTest, AHostCopyThatIsUnfrozenWithoutItsParameterIsNamed) {
  Model model;
  for (Tensor& p : model.parameters()) p.requires_grad_(false);
  model.parameter(4).requires_grad_(true);
  Attach(model);
  model.trained()[0].requires_grad_(true);
  model.Backward(0);
  EXPECT_THAT(ErrorOf([&] { model.Step([] {}); }),
              AllOf(HasSubstr("blocks.0.linear.weight"), HasSubstr("requires_grad")));
  model.parameter().requires_grad_(true);
  EXPECT_EQ(ErrorOf([&] { model.Step([] {}); }), "no error");
}

TEST_F(ParameterIdiomsTest, GradientsHaveTheTypeThatTheParameterAsksFor) {
  const auto backward = [](Model& m) {
    m.net->forward(Input().to(m.device).to(m.parameter().dtype())).pow(2).mean().backward();
  };
  for (const bool any_type : {false, true}) {
    const auto ask = [&](Model& m) {
      for (const Tensor& p : m.parameters()) {
        p.set_grad_dtype(any_type ? std::optional<at::ScalarType>() : at::kFloat);
      }
    };
    const auto narrow = [](Model& m) { m.net->to(at::kBFloat16); };
    const auto twice = [&](Model& m) {
      backward(m);
      backward(m);
    };
    ExpectAsResident(twice, [&](Model& m) {
      narrow(m);
      ask(m);
    });
    ExpectAsResident(
        [&](Model& m) {
          backward(m);
          m.net->zero_grad();
          ask(m);
          backward(m);
          m.Wait();
          EXPECT_EQ(m.trained()[0].grad_dtype(), m.parameter().grad_dtype());
          backward(m);
        },
        narrow);
  }
}

TEST_F(ParameterIdiomsTest, NarrowGradientsThatAreAddedToAWideOneAreAddedInItsType) {
  for (const bool of_parameters : {true, false}) {
    for (const bool waits : {true, false}) {
      const auto program = [&](Model& m) {
        for (const Tensor& tensor : of_parameters ? m.parameters() : m.trained()) {
          tensor.mutable_grad() =
              at::ones(tensor.sizes(), tensor.detach().options().dtype(at::kFloat));
        }
        if (waits) m.Wait();
        for (const double seed : {0, 1, 2}) {
          const Tensor x = Input(seed).to(m.device).to(at::kBFloat16);
          m.net->forward(x).pow(2).mean().backward();
        }
      };
      const auto narrow = [](Model& m) {
        m.net->to(at::kBFloat16);
        for (const Tensor& p : m.parameters()) p.set_grad_dtype(std::nullopt);
      };
      const Tensors expected = Resident(program, narrow);
      for (const bool stay : {true, false}) {
        SCOPED_TRACE(::testing::Message() << of_parameters << waits << stay);
        Model model;
        narrow(model);
        Attach(model, {.tier = SmallTier(), .gradients_stay = stay});
        program(model);
        const Tensors actual = model.Gradients();
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(AsOnCpu(actual[i], expected[i])) << i;
        }
      }
    }
  }
}

TEST_F(ParameterIdiomsTest, GradientsWithAGraphAreOnTheHostAsWell) {
  const auto keep_graph = [](Model& m, double seed) {
    m.Loss(seed).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  const auto penalty = [](Model& m) {
    Tensor sum;
    for (const Tensor& p : m.parameters()) {
      const Tensor square = p.grad().pow(2).sum();
      sum = sum.defined() ? sum + square : square;
    }
    sum.backward();
  };
  ExpectAsResident([&](Model& m) { keep_graph(m, 0); });
  ExpectAsResident([&](Model& m) {
    keep_graph(m, 0);
    penalty(m);
  });
  ExpectAsResident([&](Model& m) {
    m.Backward(0);
    keep_graph(m, 1);
    penalty(m);
    m.Wait();
    m.Backward(2);
    keep_graph(m, 3);
  });
  ExpectAsResident([&](Model& m) {
    keep_graph(m, 0);
    m.net->zero_grad();
    m.Backward(1);
  });
}

// The gradient's graph exists. Forward's nodes, which it could continue through, are freed.
TEST_F(ParameterIdiomsTest, AGradientWithAGraphWithoutTheForwardsIsAsThatOfAResidentOne) {
  const auto without_forward = [](Tensor loss) {
    loss.backward({}, /*retain_graph=*/false, /*create_graph=*/true);
  };
  for (const bool needs_forward : {true, false}) {
    std::vector<std::string> errors;
    ExpectAsResident([&](Model& m) {
      without_forward(needs_forward ? m.Loss(0) : m.parameter().pow(3).sum());
      errors.push_back(ErrorOf([&] { m.parameter().grad().pow(2).sum().backward(); }));
      m.Wait();
      if (needs_forward) m.Backward(1);
    });
    EXPECT_THAT(errors, ::testing::Each(needs_forward
                                            ? HasSubstr("backward through the graph a second time")
                                            : HasSubstr("no error")));
  }
}

TEST_F(ParameterIdiomsTest, AGradientWithAGraphThatOnlyTheHostForgetsIsNamed) {
  Model model;
  Attach(model);
  torch::optim::SGD optimizer(model.trained(), 0.1);
  model.Loss(0).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  optimizer.zero_grad();
  EXPECT_THAT(ErrorOf([&] { model.Backward(1); }),
              AllOf(HasSubstr("blocks."), HasSubstr("create_graph"), HasSubstr("ZeroGrad")));
}

using Hook = std::function<void(const Tensor& parameter)>;

class CallsHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CallsHook(Hook hook) : hook_(std::move(hook)) {}
  void operator()(const Tensor& parameter) override { hook_(parameter); }

 private:
  const Hook hook_;
};

// Sets the hook of all parameters after accumulation, or removes it.
void SetHooks(Model& m, const Hook& hook) {
  for (const Tensor& p : m.parameters()) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        p, hook ? std::make_unique<CallsHook>(hook) : nullptr);
  }
}

// LibTorch has room for one hook after accumulation.
TEST_F(ParameterIdiomsTest, AHookAfterAccumulationRunsAndGradientsArriveAllTheSame) {
  const std::vector<std::pair<std::string, Hook>> hooks = {
      {"looks", [](const Tensor& p) { EXPECT_TRUE(p.grad().defined()); }},
      {"keeps and changes",
       [](const Tensor& p) {
         const Tensor kept = p.grad();
         kept.mul_(2);
       }},
      {"forgets", [](const Tensor& p) { p.mutable_grad() = Tensor(); }}};
  for (const auto& [name, then] : hooks) {
    SCOPED_TRACE(name);
    int calls = 0;
    const auto set = [&, &then = then](Model& m) {
      SetHooks(m, [&](const Tensor& p) {
        ++calls;
        then(p);
      });
    };
    const auto thrice = [&](Model& m) {
      for (const double seed : {0, 1, 2}) {
        const int before = calls;
        m.Backward(seed);
        EXPECT_EQ(calls, before + 6);
        if (seed == 1) m.Wait();
      }
    };
    ExpectAsResident(thrice, set);
    ExpectAsResident([&](Model& m) {
      m.Backward(10);
      set(m);
      thrice(m);
    });
  }
}

TEST_F(ParameterIdiomsTest, WhatAHookHasKeptOfAParameterIsItsGradient) {
  ExpectAsResident([](Model& m) {
    Tensors kept;
    SetHooks(m, [&](const Tensor& p) {
      if (kept.size() < 6) kept.push_back(p.grad());
    });
    m.Wait();
    for (const double seed : {0, 1}) {
      m.Backward(seed);
      for (Tensor& grad : kept) grad.mul_(2);
    }
    SetHooks(m, nullptr);
  });
}

TEST_F(ParameterIdiomsTest, GradientsOfLateHooksLeaveTheDeviceFromTheNextStepOn) {
  Model model;
  Attach(model);
  int calls = 0;
  SetHooks(model, [&](const Tensor&) { ++calls; });
  model.Backward(0);
  model.Wait();
  model.net->zero_grad();
  const uint64_t left_bytes = model.weights->GetStats().gradient_bytes;
  model.Backward(1);
  EXPECT_EQ(calls, 12);
  EXPECT_GT(model.weights->GetStats().gradient_bytes, left_bytes) << "without waiting";
}

TEST_F(ParameterIdiomsTest, HooksThatAreTakenAwayTakeNoGradientsAway) {
  ExpectAsResident([](Model& m) {
    SetHooks(m, nullptr);
    m.Backward(0);
    m.net->zero_grad();
    m.Backward(1);
    m.Wait();
    m.Backward(2);
  });
}

TEST_F(ParameterIdiomsTest, AParameterThatComesLaterIsNamed) {
  const std::vector<Idiom> idioms = {
      {"late",
       [](Model& m) {
         m.net->register_parameter("late", at::zeros({3}, at::TensorOptions(m.device)));
       }},
      {"blocks.0.linear.late",
       [](Model& m) {
         m.net->blocks[0]->as<BlockImpl>()->linear->register_parameter("late", at::zeros({3}));
       }},
      {"blocks.3.linear.weight", [](Model& m) { m.net->blocks->push_back(Block()); }},
      {"blocks.1.linear.weight",
       [](Model& m) {
         auto& block = *m.net->blocks[1]->as<BlockImpl>();
         block.linear = block.replace_module("linear", torch::nn::Linear(kWidth, kWidth));
       }},
  };
  for (const Idiom& idiom : idioms) {
    Model model;
    Attach(model);
    model.Backward(0);
    idiom.use(model);
    for (const std::function<void()>& call :
         std::vector<std::function<void()>>{[&] { model.Step([] {}); }, [&] { model.Wait(); },
                                            [&] { model.weights->ClipGradNorm(1); },
                                            [&] { model.weights->WithParametersOnHost([] {}); }}) {
      EXPECT_THAT(ErrorOf(call), AllOf(HasSubstr(" " + idiom.name + " "), HasSubstr("Attach")));
    }
  }
}

TEST_F(ParameterIdiomsTest, AParameterOfAModuleOnTheStackThatComesLaterIsNamed) {
  NetImpl net(2);
  const auto weights =
      WeightOffloader::Attach(net, world_.device(), world_.backend(), {.tier = SmallTier()})
          .value();
  weights->Step([] {});
  net.blocks->push_back(Block());
  EXPECT_THAT(ErrorOf([&] { weights->Step([] {}); }), HasSubstr(" blocks.2.linear.weight "));
}

TEST_F(ParameterIdiomsTest, AParameterWithAnothersMemoryIsNamed) {
  for (const bool waits : {false, true}) {
    Model model;
    Attach(model);
    model.parameter(0).set_data(model.parameter(2).data());
    EXPECT_THAT(ErrorOf([&] { waits ? model.Wait() : model.Step([] {}); }),
                HasSubstr("blocks.0.linear.weight was given other memory"));
  }
}

// Afterwards no operator meets a streamed weight, and no Step may come to throw.
TEST_F(ParameterIdiomsTest, OtherMemoryInInferenceIsLoggedOnceWithTheParametersName) {
  std::stringstream file;
  torch::save(Net(3), file);
  const std::vector<Idiom> idioms = {
      {"to", [](Model& m) { m.net->to(at::kHalf); }},
      {"torch::load", [&](Model& m) { torch::load(m.net, file); }},
      {"another average's",
       [](Model& m) {
         const at::NoGradGuard no_grad;
         for (Tensor& p : m.parameters()) {
           const Tensor own = p.data();
           p.set_data(p * 0.5);
           p.set_data(own);
         }
       }},
  };
  for (const Idiom& idiom : idioms) {
    SCOPED_TRACE(idiom.name);
    Model model;
    Attach(model);
    const CapturedLog log;
    model.weights->WithParametersOnHost([&] {
      model.parameter().set_data(at::ones({kWidth, kWidth}));
    });
    EXPECT_EQ(log.text(), "");
    idiom.use(model);
    EXPECT_THAT(log.text(), AllOf(HasSubstr("blocks.0.linear.weight"), Not(HasSubstr("bias")),
                                  HasSubstr("WithParametersOnHost")));
  }
}

TEST_F(ParameterIdiomsTest, AnOptimizerOfTheModulesParametersIsRefusedByName) {
  const auto expect_refused = [&](torch::optim::Optimizer& optimizer, Model& model) {
    model.net->zero_grad();
    optimizer.step();
    model.Backward(0);
    for (const bool within : {false, true}) {
      EXPECT_THAT(
          ErrorOf([&] { within ? model.Step([&] { optimizer.step(); }) : void(optimizer.step()); }),
          AllOf(HasSubstr("blocks.0.linear.weight"), HasSubstr("host_parameters()")));
    }
  };
  Model model;
  Attach(model);
  torch::optim::AdamW adam(model.parameters());
  expect_refused(adam, model);
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_refused(sgd, model);
}

TEST_F(ParameterIdiomsTest, HostCopiesThatOutliveTheModelHaveTheGradientsThatHadArrived) {
  Tensors masters;
  Tensor arrived;
  {
    Model model;
    Attach(model);
    masters = model.trained();
    model.Backward(0);
    model.Wait();
    arrived = masters[0].grad().clone();
    model.Backward(1);
  }
  EXPECT_TRUE(Soon([&] { return ErrorOf([&] { masters[0].grad().norm(); }) == "no error"; }));
  EXPECT_TRUE(SameBytes(masters[0].grad(), arrived));
}

// Both get a view of what backward has made once, of other strides than their own.
TEST_F(ParameterIdiomsTest, TransposedParametersThatAreAddedHaveGradientsOfTheirOwn) {
  ExpectAsResident([](Model& model) {
    torch::optim::AdamW optimizer(model.trained());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      for (int n = 1; n < 3; ++n) {
        const Tensor ones = at::ones({kWidth, kWidth}, at::TensorOptions(model.device));
        const Tensor sum = ones + model.parameter(0).t() + model.parameter(2).t();
        (sum * n).pow(2).sum().backward();
      }
      model.Wait();
    }
  });
}

struct KindsImpl : torch::nn::Module {
  KindsImpl()
      : frozen(register_parameter("frozen", at::ones({8}), /*requires_grad=*/false)),
        table(register_buffer("table", at::ones({1 << 18}))),
        counts(register_buffer("counts", at::ones({1 << 18}, at::kInt))),
        trained(register_parameter("trained", at::ones({8}))) {}
  Tensor forward(const Tensor& x) {
    return (x * frozen * trained).sum() + table.sum() + counts.sum();
  }
  Tensor frozen, table, counts, trained;
};

// LibTorch has nothing of autograd for a tensor of which nobody has asked for it.
TEST_F(ParameterIdiomsTest, WeightsThatAutogradHasNeverSeenAreStreamed) {
  KindsImpl net;
  const auto weights =
      WeightOffloader::Attach(net, world_.device(), world_.backend(), {.tier = SmallTier()});
  ASSERT_TRUE(weights.ok()) << weights.status();
  const Tensor y = net.forward(at::ones({8}, at::TensorOptions(world_.device())));
  EXPECT_TRUE(AsOnCpu(y.detach().cpu(), KindsImpl().forward(at::ones({8})).detach()));
  y.backward();
  (*weights)->WaitForGradients();
  EXPECT_TRUE((*weights)->host_parameters()[1].grad().defined());
}

}  // namespace parameter_idioms
}  // namespace pinion::testing
