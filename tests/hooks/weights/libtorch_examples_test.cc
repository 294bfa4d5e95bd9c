// The training loops of LibTorch's own C++ examples, small and on synthetic data: with streamed
// weights they have the losses of resident ones. What a loop changes for them is its optimizers
// (over host_parameters(), within Step) and where it saves.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace libtorch_examples {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using Tensors = std::vector<Tensor>;

class LibTorchExamplesTest : public ::testing::Test {
 protected:
  LibTorchExamplesTest() : world_(MachineOptions(), SmallWindows()) {}

  // A network of an example, resident or streamed.
  struct Network {
    nn::Module& module;
    std::unique_ptr<WeightOffloader> weights;  // null: resident

    Tensors trained() const { return weights ? weights->host_parameters() : module.parameters(); }
    void Step(torch::optim::Optimizer& optimizer) const {
      weights ? weights->Step([&] { optimizer.step(); }) : void(optimizer.step());
    }
    void OnHost(const std::function<void()>& work) const {
      weights ? weights->WithParametersOnHost(work) : work();
    }
  };
  Network Place(nn::Module& module, bool is_streamed) {
    Network network{module, nullptr};
    if (is_streamed) {
      auto weights =
          WeightOffloader::Attach(module, world_.device(), world_.backend(), {.tier = SmallTier()});
      EXPECT_TRUE(weights.ok()) << weights.status();
      network.weights = *std::move(weights);
    } else {
      module.to(world_.device());
    }
    return network;
  }
  // `train` returns what it has seen: losses, outputs, bytes of what it has saved.
  void ExpectSameTraining(const std::function<Tensors(bool is_streamed)>& train) {
    const auto seeded = [&](bool is_streamed) {
      SeedGenerators();
      return train(is_streamed);
    };
    const Tensors expected = seeded(false);
    const Tensors actual = seeded(true);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(AsOnCpu(actual[i].detach().cpu(), expected[i].detach().cpu())) << i;
    }
  }
  Tensor Random(at::IntArrayRef sizes) { return at::randn(sizes).to(world_.device()); }

  EmuWorld world_;
};

struct GeneratorImpl : nn::Module {
  explicit GeneratorImpl(int64_t noise)
      : layers(register_module(
            "layers",
            nn::Sequential(
                nn::ConvTranspose2d(nn::ConvTranspose2dOptions(noise, 16, 4).bias(false)),
                nn::BatchNorm2d(16), nn::ReLU(),
                nn::ConvTranspose2d(
                    nn::ConvTranspose2dOptions(16, 1, 4).stride(2).padding(1).bias(false)),
                nn::Tanh()))) {}
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers;
};
TORCH_MODULE(Generator);

nn::Sequential Discriminator() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 4).stride(2).padding(1).bias(false)),
                        nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                        nn::Conv2d(nn::Conv2dOptions(16, 16, 3).padding(1).bias(false)),
                        nn::BatchNorm2d(16),
                        nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                        nn::Conv2d(nn::Conv2dOptions(16, 1, 4).bias(false)), nn::Sigmoid());
}

// The generator's loss leaves gradients in the discriminator, which the next round forgets: through
// the module, as the example does, or through its optimizer.
TEST_F(LibTorchExamplesTest, TwoNetworksWithTwoOptimizersTrainAgainstEachOther) {
  constexpr int64_t kNoise = 8;
  constexpr int64_t kBatch = 4;
  for (const bool zero_by_optimizer : {false, true}) {
    SCOPED_TRACE(zero_by_optimizer);
    ExpectSameTraining([&](bool is_streamed) {
      Generator generator(kNoise);
      nn::Sequential discriminator = Discriminator();
      const Network generating = Place(*generator, is_streamed);
      const Network discriminating = Place(*discriminator, is_streamed);
      torch::optim::Adam generator_optimizer(generating.trained(),
                                             torch::optim::AdamOptions(2e-3).betas({0.5, 0.999}));
      torch::optim::Adam discriminator_optimizer(
          discriminating.trained(), torch::optim::AdamOptions(2e-3).betas({0.5, 0.999}));
      const auto zero = [&](nn::Module& module, torch::optim::Optimizer& optimizer) {
        zero_by_optimizer ? optimizer.zero_grad() : module.zero_grad();
      };
      Tensors seen;
      for (int batch = 0; batch < 5; ++batch) {
        zero(*discriminator, discriminator_optimizer);
        const Tensor real_images = Random({kBatch, 1, 8, 8});
        const Tensor real_labels = at::full({kBatch}, 0.9, real_images.options());
        const Tensor real = discriminator->forward(real_images).reshape(real_labels.sizes());
        const Tensor real_loss = F::binary_cross_entropy(real, real_labels);
        real_loss.backward();
        const Tensor fake_images = generator->forward(Random({kBatch, kNoise, 1, 1}));
        Tensor fake_labels = at::zeros({kBatch}, real_images.options());
        const Tensor fake =
            discriminator->forward(fake_images.detach()).reshape(fake_labels.sizes());
        const Tensor fake_loss = F::binary_cross_entropy(fake, fake_labels);
        fake_loss.backward();
        discriminating.Step(discriminator_optimizer);

        zero(*generator, generator_optimizer);
        fake_labels.fill_(1);
        const Tensor fooled = discriminator->forward(fake_images).reshape(fake_labels.sizes());
        const Tensor loss = F::binary_cross_entropy(fooled, fake_labels);
        loss.backward();
        generating.Step(generator_optimizer);
        seen.insert(seen.end(), {real_loss, fake_loss, loss});

        if (batch != 2) continue;
        std::stringstream saved;
        generating.OnHost([&] { torch::save(generator, saved); });
        discriminating.OnHost([&] { torch::save(discriminator, saved); });
        torch::save(generator_optimizer, saved);
      }
      const at::NoGradGuard no_grad;
      generator->eval();
      seen.push_back(generator->forward(Random({kBatch, kNoise, 1, 1})));
      return seen;
    });
  }
}

// On the stack, as the example has it.
struct DigitsNet : nn::Module {
  DigitsNet() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("drop", drop);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  Tensor forward(Tensor x) {
    x = at::relu(at::max_pool2d(conv1->forward(x), 2));
    x = at::relu(at::max_pool2d(drop->forward(conv2->forward(x)), 2));
    x = at::relu(fc1->forward(x.flatten(1)));
    return at::log_softmax(fc2->forward(x), 1);
  }
  nn::Conv2d conv1{nn::Conv2dOptions(1, 4, 3)};
  nn::Conv2d conv2{nn::Conv2dOptions(4, 8, 3)};
  nn::Dropout2d drop;
  nn::Linear fc1{8 * 2 * 2, 32}, fc2{32, 10};
};

TEST_F(LibTorchExamplesTest, AClassifierOfDigitsTrainsAndIsTestedInTurn) {
  ExpectSameTraining([&](bool is_streamed) {
    DigitsNet model;
    const Network network = Place(model, is_streamed);
    torch::optim::SGD optimizer(network.trained(), torch::optim::SGDOptions(0.01).momentum(0.5));
    const Tensor labels = at::arange(6).to(world_.device());
    Tensors seen;
    for (int epoch = 0; epoch < 3; ++epoch) {
      model.train();
      for (int batch = 0; batch < 3; ++batch) {
        optimizer.zero_grad();
        const Tensor loss = F::nll_loss(model.forward(Random({6, 1, 14, 14})), labels);
        loss.backward();
        network.Step(optimizer);
        seen.push_back(loss);
      }
      const at::NoGradGuard no_grad;
      model.eval();
      seen.push_back(model.forward(Random({6, 1, 14, 14})));
    }
    return seen;
  });
}

struct LanguageModelImpl : nn::Module {
  LanguageModelImpl()
      : embedding(register_module("embedding", nn::Embedding(20, 16))),
        encoder(register_module(
            "encoder",
            nn::TransformerEncoder(nn::TransformerEncoderOptions(
                nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(0.1), 3)))),
        head(register_module("head", nn::Linear(16, 20))) {}
  Tensor forward(const Tensor& tokens) {
    return head->forward(encoder->forward(embedding->forward(tokens)));
  }
  nn::Embedding embedding;
  nn::TransformerEncoder encoder;
  nn::Linear head;
};
TORCH_MODULE(LanguageModel);

// Gradients are accumulated and clipped through the module.
TEST_F(LibTorchExamplesTest, ATransformerTrainsWithClippedGradientsAndIsSavedAndLoaded) {
  ExpectSameTraining([&](bool is_streamed) {
    LanguageModel model;
    const Network network = Place(*model, is_streamed);
    torch::optim::Adam optimizer(network.trained(), torch::optim::AdamOptions(1e-3));
    const Tensor tokens = at::arange(24).view({6, 4}).remainder(20).to(world_.device());
    Tensors seen;
    std::stringstream saved;
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      for (int part = 0; part < 2; ++part) {
        const Tensor logits = model->forward(tokens.roll(part + step, 0)).view({-1, 20});
        const Tensor loss = F::cross_entropy(logits, tokens.roll(step, 1).view({-1}));
        loss.backward();
        seen.push_back(loss);
      }
      seen.push_back(at::full({1}, torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5)));
      network.Step(optimizer);
      if (step == 1) network.OnHost([&] { torch::save(model, saved); });
    }
    network.OnHost([&] { torch::load(model, saved, world_.device()); });
    const at::NoGradGuard no_grad;
    model->eval();
    seen.push_back(model->forward(tokens));
    return seen;
  });
}

template <typename Layer, typename Options>
struct StackedImpl : nn::Module {
  explicit StackedImpl(int layers) : stack(register_module("stack", nn::ModuleList())) {
    for (int i = 0; i < layers; ++i) stack->push_back(Layer(Options(8, 8).num_layers(2)));
  }
  Tensor forward(Tensor x) {
    for (const auto& layer : *stack) {
      x = std::get<0>(layer->template as<Layer>()->forward(x));
    }
    return x;
  }
  nn::ModuleList stack;
};

// A kernel of a layer's backward uses weights that may have left the device since forward.
TEST_F(LibTorchExamplesTest, RecurrentLayersMoreThanTheDeviceHoldsTrain) {
  const auto train = [&](auto& model, bool is_streamed) {
    const Network network = Place(model, is_streamed);
    torch::optim::SGD optimizer(network.trained(), torch::optim::SGDOptions(0.1));
    Tensors seen;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const Tensor loss = model.forward(Random({5, 2, 8})).pow(2).mean();
      loss.backward();
      network.Step(optimizer);
      seen.push_back(loss);
    }
    for (const Tensor& tensor : network.trained()) seen.push_back(tensor.clone());
    return seen;
  };
  for (const int layers : {3, 6}) {
    SCOPED_TRACE(layers);
    ExpectSameTraining([&](bool is_streamed) {
      StackedImpl<nn::LSTM, nn::LSTMOptions> model(layers);
      return train(model, is_streamed);
    });
    ExpectSameTraining([&](bool is_streamed) {
      StackedImpl<nn::GRU, nn::GRUOptions> model(layers);
      return train(model, is_streamed);
    });
  }
}

}  // namespace libtorch_examples
}  // namespace pinion::testing
