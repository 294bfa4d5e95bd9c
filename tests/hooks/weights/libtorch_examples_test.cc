// The training loops of LibTorch's own C++ examples, small and on synthetic data: with streamed
// weights, with offloaded activations and with both they have the losses of resident ones. What a
// loop changes for streamed weights is its optimizers (over host_parameters(), within Step) and
// where it saves and loads (within WithParametersOnHost).

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
#include <torch/enum.h>
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

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace libtorch_examples {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

// How a run of a program has its networks.
struct Way {
  bool streams_weights = false;
  bool offloads_activations = false;
};

class LibTorchExamplesTest : public ::testing::Test {
 protected:
  LibTorchExamplesTest() : world_(MachineOptions(), Eager()) {}

  // Every activation leaves at once.
  static OffloadOptions Eager() {
    OffloadOptions options = SmallWindows(/*window_bytes=*/1);
    options.min_offload_bytes = 1;
    return options;
  }

  // What the parameters of a streamed network take, and how many bytes of them were copied.
  struct StreamedBytes {
    uint64_t parameters = 0;
    uint64_t fetched = 0;
    uint64_t gradients = 0;
  };

  // A network of an example, resident or streamed.
  struct Network {
    nn::Module& module;
    std::vector<StreamedBytes>& streamed;
    std::unique_ptr<WeightOffloader> weights;  // null: resident

    ~Network() {
      if (weights == nullptr) return;
      const WeightStats stats = weights->GetStats();
      streamed.push_back({.fetched = stats.fetched_bytes, .gradients = stats.gradient_bytes});
      for (const Tensor& parameter : module.parameters()) {
        streamed.back().parameters += parameter.nbytes();
      }
    }
    Tensors trained() const { return weights ? weights->host_parameters() : module.parameters(); }
    void Step(torch::optim::Optimizer& optimizer) const {
      weights ? weights->Step([&] { optimizer.step(); }) : void(optimizer.step());
    }
    void OnHost(const std::function<void()>& work) const {
      weights ? weights->WithParametersOnHost(work) : work();
    }
  };
  Network Place(nn::Module& module, const Way& way) {
    if (!way.streams_weights) {
      module.to(world_.device());
      return {module, streamed_, nullptr};
    }
    return {
        module, streamed_,
        WeightOffloader::Attach(module, world_.device(), world_.backend(), {.tier = SmallTier()})
            .value()};
  }
  template <typename Module>
  Tensor Forward(const Way& way, Module& module, const Tensor& x) {
    std::optional<OffloadScope> scope;
    if (way.offloads_activations) scope.emplace(world_.session());
    return module.forward(x);
  }
  // `train` returns what it has seen: losses, outputs, parameters. A way that moves nothing fails.
  void ExpectSameTraining(const std::function<Tensors(const Way& way)>& train) {
    SeedGenerators();
    const Tensors expected = train({});
    for (const Way& way : {Way{.streams_weights = true}, Way{.offloads_activations = true},
                           Way{.streams_weights = true, .offloads_activations = true}}) {
      SCOPED_TRACE(::testing::Message() << "streams " << way.streams_weights << ", offloads "
                                        << way.offloads_activations);
      streamed_.clear();
      const OffloadStats before = world_.QuietStats();
      SeedGenerators();
      const Tensors actual = train(way);
      const OffloadStats after = world_.QuietStats();
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(AsOnCpu(actual[i].detach().cpu(), expected[i].detach().cpu())) << i;
      }
      EXPECT_EQ(streamed_.empty(), !way.streams_weights);
      for (const StreamedBytes& bytes : streamed_) {
        EXPECT_GT(bytes.fetched, bytes.parameters) << "each more than once";
        EXPECT_GT(bytes.gradients, bytes.parameters);
      }
      if (way.offloads_activations) {
        EXPECT_GT(after.offloaded, before.offloaded);
        EXPECT_GT(after.evicted_bytes, before.evicted_bytes);
        EXPECT_GT(after.fetched_bytes, before.fetched_bytes);
      }
    }
  }
  Tensor Random(at::IntArrayRef sizes) { return at::randn(sizes).to(world_.device()); }

  // What a run of the GAN's program has written, by name: the next run goes on from there.
  using Files = std::map<std::string, std::string>;
  // The parts of the loop in which programs differ. The last three are what streamed weights
  // change.
  struct Loop {
    bool zeroes_by_optimizer = false;
    bool trains_host_copies = true;
    bool steps_within_step = true;
    bool saves_on_host = true;
  };
  Tensors TrainGan(const Way& way, const Loop& loop, Files& files);

  EmuWorld world_;
  std::vector<StreamedBytes> streamed_;
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

// The calls of the loop in LibTorch's tutorial on GANs, in their order.
Tensors LibTorchExamplesTest::TrainGan(const Way& way, const Loop& loop, Files& files) {
  constexpr int64_t kNoise = 8;
  constexpr int64_t kBatch = 4;
  constexpr int kBatches = 5;
  constexpr int kSaveEvery = 2;
  Generator generator(kNoise);
  const Network generating = Place(*generator, way);
  nn::Sequential discriminator = Discriminator();
  const Network discriminating = Place(*discriminator, way);
  const auto trained = [&](const Network& network) {
    return loop.trains_host_copies ? network.trained() : network.module.parameters();
  };
  const torch::optim::AdamOptions adam = torch::optim::AdamOptions(2e-3).betas({0.5, 0.5});
  torch::optim::Adam generator_optimizer(trained(generating), adam);
  torch::optim::Adam discriminator_optimizer(trained(discriminating), adam);

  const auto zero = [&](nn::Module& module, torch::optim::Optimizer& optimizer) {
    loop.zeroes_by_optimizer ? optimizer.zero_grad() : module.zero_grad();
  };
  const auto step = [&](const Network& network, torch::optim::Optimizer& optimizer) {
    loop.steps_within_step ? network.Step(optimizer) : void(optimizer.step());
  };
  const auto on_host = [&](const Network& network, const std::function<void()>& work) {
    loop.saves_on_host ? network.OnHost(work) : work();
  };
  const auto save = [&](const auto& value, const std::string& name) {
    std::stringstream file;
    torch::save(value, file);
    files[name] = file.str();
  };
  const auto load = [&](auto& value, const std::string& name, const auto&... device) {
    std::stringstream file(files.at(name));
    torch::load(value, file, device...);
  };

  if (!files.empty()) {
    on_host(generating, [&] { load(generator, "generator"); });
    load(generator_optimizer, "generator optimizer");
    on_host(discriminating, [&] { load(discriminator, "discriminator"); });
    load(discriminator_optimizer, "discriminator optimizer");
  }
  Tensors seen;
  for (int batch = 1; batch <= kBatches; ++batch) {
    zero(*discriminator, discriminator_optimizer);
    const Tensor real_images = Random({kBatch, 1, 8, 8});
    const Tensor real_labels = at::empty({kBatch}, real_images.options()).uniform_(0.8, 1.0);
    const Tensor real = Forward(way, *discriminator, real_images).reshape(real_labels.sizes());
    const Tensor real_loss = F::binary_cross_entropy(real, real_labels);
    real_loss.backward();

    const Tensor noise = at::randn({kBatch, kNoise, 1, 1}, real_images.options());
    const Tensor fake_images = Forward(way, *generator, noise);
    const Tensor fake_labels = at::zeros({kBatch}, real_images.options());
    Tensor fake = Forward(way, *discriminator, fake_images.detach()).reshape(fake_labels.sizes());
    const Tensor fake_loss = F::binary_cross_entropy(fake, fake_labels);
    fake_loss.backward();
    const Tensor loss = real_loss + fake_loss;
    step(discriminating, discriminator_optimizer);

    // Its loss leaves gradients in the discriminator, which the next batch forgets.
    zero(*generator, generator_optimizer);
    fake_labels.fill_(1);
    fake = Forward(way, *discriminator, fake_images).reshape(fake_labels.sizes());
    const Tensor generator_loss = F::binary_cross_entropy(fake, fake_labels);
    generator_loss.backward();
    step(generating, generator_optimizer);
    seen.push_back(at::full({1}, loss.item<float>()));
    seen.push_back(at::full({1}, generator_loss.item<float>()));

    if (batch % kSaveEvery != 0) continue;
    on_host(generating, [&] { save(generator, "generator"); });
    save(generator_optimizer, "generator optimizer");
    on_host(discriminating, [&] { save(discriminator, "discriminator"); });
    save(discriminator_optimizer, "discriminator optimizer");
    const Tensor samples =
        Forward(way, *generator, at::randn({2, kNoise, 1, 1}, real_images.options()));
    save((samples + 1) / 2, "samples");
    seen.push_back(samples.detach());  // nobody reads back what its graph has saved
  }
  Generator saved(kNoise);
  load(saved, "generator", c10::Device(at::kCPU));
  for (const Tensor& parameter : saved->parameters()) seen.push_back(parameter);
  return seen;
}

TEST_F(LibTorchExamplesTest, AGanTrainsIsSavedWithinItsLoopAndGoesOnFromWhatWasSaved) {
  for (const bool zeroes_by_optimizer : {false, true}) {
    SCOPED_TRACE(zeroes_by_optimizer);
    const Loop loop = {.zeroes_by_optimizer = zeroes_by_optimizer};
    ExpectSameTraining([&](const Way& way) {
      Files files;
      Tensors seen = TrainGan(way, loop, files);
      const Tensors restored = TrainGan(way, loop, files);
      seen.insert(seen.end(), restored.begin(), restored.end());
      return seen;
    });
  }
}

// Each change that streamed weights ask for: without it the loop ends in an error that says where.
TEST_F(LibTorchExamplesTest, AGanWhoseOptimizersHaveTheModulesParametersIsRefusedByName) {
  for (const bool within : {false, true}) {
    Files files;
    const Loop loop = {.trains_host_copies = false, .steps_within_step = within};
    EXPECT_THAT(ErrorOf([&] { TrainGan({.streams_weights = true}, loop, files); }),
                AllOf(HasSubstr(within ? "\"0\"" : "0.weight"), HasSubstr("host_parameters()")));
  }
}

TEST_F(LibTorchExamplesTest, AGanWhoseOptimizersStepOutsideStepIsRefusedByName) {
  Files files;
  const Loop loop = {.steps_within_step = false};
  EXPECT_THAT(ErrorOf([&] { TrainGan({.streams_weights = true}, loop, files); }),
              AllOf(HasSubstr("0.weight"), HasSubstr("Step")));
}

TEST_F(LibTorchExamplesTest, AGanThatIsSavedFromTheDeviceIsRefusedAndNothingIsWritten) {
  Files files;
  const Loop loop = {.saves_on_host = false};
  EXPECT_THAT(ErrorOf([&] { TrainGan({.streams_weights = true}, loop, files); }),
              HasSubstr("WithParametersOnHost"));
  EXPECT_TRUE(files.empty());
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
  ExpectSameTraining([&](const Way& way) {
    DigitsNet model;
    const Network network = Place(model, way);
    torch::optim::SGD optimizer(network.trained(), torch::optim::SGDOptions(0.01).momentum(0.5));
    const Tensor labels = at::arange(6).to(world_.device());
    Tensors seen;
    for (int epoch = 0; epoch < 3; ++epoch) {
      model.train();
      for (int batch = 0; batch < 3; ++batch) {
        const Tensor images = Random({6, 1, 14, 14});
        optimizer.zero_grad();
        const Tensor loss = F::nll_loss(Forward(way, model, images), labels);
        EXPECT_FALSE(std::isnan(loss.item<float>()));
        loss.backward();
        network.Step(optimizer);
        seen.push_back(loss);
      }
      const at::NoGradGuard no_grad;
      model.eval();
      const Tensor output = model.forward(Random({6, 1, 14, 14}));
      seen.push_back(F::nll_loss(output, labels, F::NLLLossFuncOptions().reduction(torch::kSum)));
      seen.push_back(output.argmax(1).eq(labels).sum());
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
  ExpectSameTraining([&](const Way& way) {
    LanguageModel model;
    const Network network = Place(*model, way);
    torch::optim::Adam optimizer(network.trained(), torch::optim::AdamOptions(1e-3));
    const Tensor tokens = at::arange(24).view({6, 4}).remainder(20).to(world_.device());
    Tensors seen;
    std::stringstream saved;
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      for (int part = 0; part < 2; ++part) {
        const Tensor logits = Forward(way, *model, tokens.roll(part + step, 0)).view({-1, 20});
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
  const auto train = [&](auto& model, const Way& way) {
    const Network network = Place(model, way);
    torch::optim::SGD optimizer(network.trained(), torch::optim::SGDOptions(0.1));
    Tensors seen;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const Tensor loss = Forward(way, model, Random({5, 2, 8})).pow(2).mean();
      loss.backward();
      network.Step(optimizer);
      seen.push_back(loss);
    }
    for (const Tensor& tensor : network.trained()) seen.push_back(tensor.clone());
    return seen;
  };
  for (const int layers : {3, 6}) {
    SCOPED_TRACE(layers);
    ExpectSameTraining([&](const Way& way) {
      StackedImpl<nn::LSTM, nn::LSTMOptions> model(layers);
      return train(model, way);
    });
    ExpectSameTraining([&](const Way& way) {
      StackedImpl<nn::GRU, nn::GRUOptions> model(layers);
      return train(model, way);
    });
  }
}

}  // namespace libtorch_examples
}  // namespace pinion::testing
