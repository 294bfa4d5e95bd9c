// Streamed weights: the same results bit for bit, within a window, and what is said
// where something cannot be.

#include "pinion/hooks/weights/weight_offloader.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/tier/torch_tier.h"
#include "pinion/hooks/weights/host_gradients.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/counting_allocator.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/footprint.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Tensors = std::vector<Tensor>;

class WeightOffloaderTest : public ::testing::Test {
 protected:
  explicit WeightOffloaderTest(const EmulatedOptions& machine = MachineOptions())
      : world_(machine, SmallWindows()) {}

  WeightOptions Options(uint64_t window_bytes = 0) {
    return {.tier = SmallTier(), .window_bytes = window_bytes};
  }
  std::unique_ptr<WeightOffloader> Attach(torch::nn::Module& module, uint64_t window_bytes = 0) {
    return AttachWith(module, Options(window_bytes));
  }
  std::unique_ptr<WeightOffloader> AttachWith(torch::nn::Module& module,
                                              const WeightOptions& options) {
    auto weights = WeightOffloader::Attach(module, world_.device(), world_.backend(), options);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }
  // The same with gradients that stay on the device.
  std::unique_ptr<WeightOffloader> AttachWithGradientsOnDevice(torch::nn::Module& module) {
    WeightOptions options = Options();
    options.gradients_stay = true;
    return AttachWith(module, options);
  }
  std::string AttachError(torch::nn::Module& module, const WeightOptions& options) {
    return WeightOffloader::Attach(module, world_.device(), world_.backend(), options)
        .status()
        .ToString();
  }
  Tensor X(double seed = 0) { return Input(seed).to(world_.device()); }

  // Expects that `net` returns what `plain` returns on the CPU.
  void ExpectOutputOf(Net plain, Net& net) {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(AsOnCpu(net->forward(X()).cpu(), plain->forward(Input())));
  }
  // Expects the gradients of `plain`, which has run on the CPU.
  static void ExpectGradientsOf(const torch::nn::Module& plain, WeightOffloader& weights) {
    weights.WaitForGradients();
    ASSERT_EQ(weights.host_parameters().size(), plain.parameters().size());
    for (size_t i = 0; i < plain.parameters().size(); ++i) {
      EXPECT_TRUE(AsOnCpu(weights.host_parameters()[i].grad(), plain.parameters()[i].grad())) << i;
    }
  }
  static void ExpectSameBytes(const Tensors& expected, const Tensors& actual) {
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(SameBytes(expected[i], actual[i])) << i;
    }
  }
  static Tensors CopiesOf(const Tensors& tensors) {
    Tensors copies;
    for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
    return copies;
  }
  static Tensors GradientsOf(const Tensors& parameters) {
    Tensors gradients;
    for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad().cpu());
    return gradients;
  }

  // Losses and parameters of steps on the device, whose optimizer works on the host all the same:
  // the weights are copied both ways by hand.
  struct Trained {
    Tensors losses;
    Tensors parameters;
  };
  Trained TrainByHand(int layers, int steps, int backwards = 1) {
    Net net(layers);
    Tensors masters;
    for (const Tensor& parameter : net->parameters()) {
      masters.push_back(parameter.detach().clone().requires_grad_());
    }
    net->to(world_.device());
    torch::optim::AdamW optimizer(masters, torch::optim::AdamWOptions(0.01));
    Trained trained;
    for (int step = 0; step < steps; ++step) {
      for (int n = 0; n < backwards; ++n) {
        const Tensor loss = net->forward(X(step + 10 * n)).pow(2).mean();
        loss.backward();
        trained.losses.push_back(loss.detach().cpu());
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < masters.size(); ++i) {
          Tensor& grad = net->parameters()[i].mutable_grad();
          if (masters[i].grad().defined()) {
            masters[i].mutable_grad().add_(grad.cpu());
          } else {
            masters[i].mutable_grad() = grad.cpu();
          }
          grad = Tensor();
        }
      }
      optimizer.step();
      optimizer.zero_grad();
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters.size(); ++i) net->parameters()[i].copy_(masters[i]);
    }
    trained.parameters = CopiesOf(masters);
    return trained;
  }
  static Tensor Forward(Net& net, Tensor x) { return net->forward(std::move(x)); }
  Trained TrainStreamed(int layers, int steps,
                        const std::function<Tensor(Net&, Tensor)>& forward = Forward,
                        int backwards = 1, uint64_t window_bytes = 0) {
    Net net(layers);
    const auto weights = Attach(*net, window_bytes);
    torch::optim::AdamW optimizer(weights->host_parameters(), torch::optim::AdamWOptions(0.01));
    Trained trained;
    for (int step = 0; step < steps; ++step) {
      for (int n = 0; n < backwards; ++n) {
        const Tensor loss = forward(net, X(step + 10 * n)).pow(2).mean();
        loss.backward();
        trained.losses.push_back(loss.detach().cpu());
      }
      weights->Step([&] { optimizer.step(); });
      optimizer.zero_grad();
    }
    stats_ = weights->GetStats();
    trained.parameters = CopiesOf(weights->host_parameters());
    return trained;
  }
  static void ExpectSame(const Trained& expected, const Trained& actual) {
    {
      SCOPED_TRACE("losses");
      ExpectSameBytes(expected.losses, actual.losses);
    }
    SCOPED_TRACE("parameters");
    ExpectSameBytes(expected.parameters, actual.parameters);
  }

  EmuWorld world_;
  WeightStats stats_;
};

TEST_F(WeightOffloaderTest, TrainingIsTheSameBitForBitAndEachUnitComesAheadOfItsUse) {
  const Trained expected = TrainByHand(6, 5);
  const Trained actual = TrainStreamed(6, 5);
  ExpectSame(expected, actual);
  // Six of forward and three of backward: the turn finds two there, and the input needs no
  // gradient.
  EXPECT_EQ(stats_.fetches, 5u * 9 + 2) << "and two for the step that does not come";
  EXPECT_EQ(stats_.fetched_bytes, stats_.fetches * kUnitBytes);
  EXPECT_GE(stats_.fetched_ahead, 3u * 8) << "in the first steps nothing is known";
  EXPECT_GE(stats_.gradient_bytes, 5u * 6 * kLayerBytes);
}

TEST_F(WeightOffloaderTest, ADeviceWithoutANumberIsTheCurrentOne) {
  Net net(3);
  const auto weights = WeightOffloader::Attach(*net, c10::Device(world_.device().type()),
                                               world_.backend(), Options());
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(net->forward(X()).device(), world_.device());
}

TEST_F(WeightOffloaderTest, AnyWindowGivesTheSameResults) {
  const Trained expected = TrainByHand(5, 3);
  for (const uint64_t window_bytes : {kUnitBytes, 3 * kUnitBytes, 100 * kUnitBytes}) {
    ExpectSame(expected, TrainStreamed(5, 3, Forward, /*backwards=*/1, window_bytes));
  }
  EXPECT_EQ(stats_.fetches, 3u * 5 + 5) << "what fits stays from forward to backward";
}

TEST_F(WeightOffloaderTest, GradientsOfSeveralBackwardsAddUp) {
  ExpectSame(TrainByHand(4, 3, /*backwards=*/3), TrainStreamed(4, 3, Forward, /*backwards=*/3));
}

TEST_F(WeightOffloaderTest, InsideAnOffloadScopeActivationsLeaveAsWell) {
  const auto forward = [this](Net& net, const Tensor& x) {
    const OffloadScope scope(world_.session());
    return net->forward(x);
  };
  ExpectSame(TrainByHand(6, 3), TrainStreamed(6, 3, forward));
  const OffloadStats stats = world_.QuietStats();
  EXPECT_GT(stats.offloaded, 0u);
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.fetched_bytes, 0u);
  EXPECT_LT(stats.offloaded_bytes / stats.offloaded, kUnitBytes / 2) << "no weight leaves";
}

TEST_F(WeightOffloaderTest, CheckpointsFetchForTheirSecondForward) {
  const auto forward = [](Net& net, Tensor x) {
    for (const auto& block : *net->blocks) {
      x = checkpoint([block](const Tensor& in) { return block->as<BlockImpl>()->forward(in); }, x);
    }
    return x;
  };
  ExpectSame(TrainByHand(6, 3), TrainStreamed(6, 3, forward));
}

TEST_F(WeightOffloaderTest, ThePeakIsTheWindowsUnitsAsManyGradientsAndTheActivations) {
  constexpr int kLayers = 12;
  const auto peak_of_activations = [&] {
    Net net(kLayers);
    net->to(world_.device());
    const Tensor x = X();
    world_.ResetPeak();
    const uint64_t before = world_.device_bytes();
    const Tensor loss = net->forward(x).pow(2).mean();
    const uint64_t forward_bytes = world_.peak_device_bytes() - before;
    loss.backward();
    return forward_bytes;
  };
  const uint64_t activation_bytes = peak_of_activations();
  const uint64_t held = world_.device_bytes();  // by cuBLAS on a GPU
  for (const uint64_t units : {2, 3}) {
    SCOPED_TRACE(units);
    Net net(kLayers);
    const auto weights = Attach(*net, units == 2 ? 0 : units * kUnitBytes);
    ASSERT_LT(world_.device_bytes() - held, kLayers * kUnitBytes / 4)
        << "no byte of the model is there";
    const Tensor x = X();
    for (int step = 0; step < 3; ++step) {
      world_.ResetPeak();
      net->forward(x).pow(2).mean().backward();
      weights->ZeroGrad();
      EXPECT_LE(world_.peak_device_bytes() - held,
                activation_bytes + units * (kUnitBytes + kLayerBytes) + x.nbytes() * 4)
          << "step " << step;
    }
  }
}

TEST_F(WeightOffloaderTest, AParameterThatIsAwayReadsAsItsMaster) {
  Net net(3);
  const Tensor plain = net->parameters()[0].detach().clone();
  const auto weights = Attach(*net);
  const Tensor parameter = net->parameters()[0];
  EXPECT_EQ(parameter.device(), world_.device());
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_TRUE(parameter.requires_grad());
  EXPECT_TRUE(SameBytes(parameter.detach().cpu(), plain));
  EXPECT_TRUE(SameBytes(parameter.t()[3].detach().cpu(), plain.t()[3])) << "a view of it, too";
  EXPECT_TRUE(SameBytes(weights->host_parameters()[0].detach(), plain));
}

TEST_F(WeightOffloaderTest, AModelIsSavedAndLoadedOnTheHost) {
  Net net(3);
  const Tensor plain = net->parameters()[0].detach().clone();
  const auto weights = Attach(*net);
  std::stringstream saved;
  weights->WithParametersOnHost([&] { torch::save(net, saved); });
  EXPECT_EQ(net->parameters()[0].device(), world_.device());
  Net other(3);
  {
    const at::NoGradGuard no_grad;
    for (Tensor& parameter : other->parameters()) parameter.zero_();
  }
  const auto other_weights = Attach(*other);
  other->forward(X()).sum().backward();
  other_weights->WithParametersOnHost([&] { torch::load(other, saved); });
  EXPECT_TRUE(SameBytes(other_weights->host_parameters()[0].detach(), plain));
  ExpectOutputOf(Net(3), other);
}

TEST_F(WeightOffloaderTest, WhereABlockHasLeftTheModelTheOthersAreOnTheHostAndAreStreamedAgain) {
  const auto model = std::make_shared<torch::nn::Module>();
  const auto block = model->register_module("block", Block());
  model->register_module("lost", Block());
  const auto weights = Attach(*model);
  model->unregister_module("lost");
  const CapturedLog log;
  weights->WithParametersOnHost([&] { EXPECT_TRUE(block->linear->weight.is_cpu()); });
  EXPECT_EQ(block->linear->weight.device(), world_.device());
  EXPECT_EQ(log.text(), "");
}

TEST_F(WeightOffloaderTest, SavingFromTheDeviceIsRefusedWhereverTheWeightsAreAndNothingIsWritten) {
  for (const int layers : {2, 6}) {  // of which two fit
    SCOPED_TRACE(layers);
    Net net(layers);
    const auto weights = Attach(*net);
    net->forward(X()).sum().backward();
    std::stringstream file;
    EXPECT_THAT(ErrorOf([&] { torch::save(net, file); }), HasSubstr("WithParametersOnHost"));
    for (const Tensor& tensor :
         {net->parameters()[0], net->parameters()[0].t(), net->parameters()[0].grad()}) {
      EXPECT_THAT(ErrorOf([&] { torch::save(tensor, file); }), HasSubstr("WithParametersOnHost"));
    }
    weights->WaitForGradients();
    EXPECT_THAT(ErrorOf([&] { torch::save(net->parameters()[0].grad(), file); }),
                HasSubstr("save host_parameters()[i].grad()"));
    EXPECT_LT(file.str().size(), kLayerBytes) << "headers alone";
  }
  std::stringstream file;
  const Tensor plain = X();
  torch::save(plain, file);
  Tensor loaded;
  torch::load(loaded, file);
  EXPECT_TRUE(SameBytes(loaded.cpu(), plain.cpu())) << "other tensors of the device are saved";
}

TEST_F(WeightOffloaderTest, AModelThatWasSavedInInferenceModeTrainsOn) {
  Net net(2);
  const auto weights = Attach(*net);
  {
    const c10::InferenceMode inference;
    std::stringstream saved;
    weights->WithParametersOnHost([&] { torch::save(net, saved); });
  }
  net->forward(X()).sum().backward();
  weights->WaitForGradients();
  EXPECT_TRUE(weights->host_parameters()[0].grad().defined());
}

TEST_F(WeightOffloaderTest, AnotherViewOfAParametersMemoryIsAnotherValue) {
  Net net(2);
  const Tensor plain = net->parameters()[0].detach().clone();
  const auto weights = Attach(*net);
  weights->WithParametersOnHost([&] {
    Tensor parameter = net->parameters()[0];
    parameter.set_data(parameter.detach().t());
  });
  EXPECT_TRUE(SameBytes(weights->host_parameters()[0].detach(), plain.t().contiguous()));
}

TEST_F(WeightOffloaderTest, AnotherShapeIsRefusedOnTheHostAndTheModelIsWhatItWas) {
  Net net(2);
  const auto weights = Attach(*net);
  EXPECT_THAT(
      ErrorOf([&] {
        weights->WithParametersOnHost([&] { net->parameters()[0].set_data(at::ones({3, 3})); });
      }),
      HasSubstr("blocks.0.linear.weight was given"));
  ExpectOutputOf(Net(2), net);
}

TEST_F(WeightOffloaderTest, WritingToAStreamedParameterThrowsBeforeAnythingIsWritten) {
  Net net(2);
  const Tensor plain = net->parameters()[0].detach().clone();
  const auto weights = Attach(*net);
  const at::NoGradGuard no_grad;
  for (const auto& write : std::vector<std::function<void(Tensor)>>{
           [](Tensor p) { p.add_(1); }, [](Tensor p) { p.t().zero_(); },
           [](Tensor p) { at::tanh_out(p, p); }}) {
    EXPECT_THAT(ErrorOf([&] { write(net->parameters()[0]); }),
                HasSubstr("would change the weight blocks.0.linear.weight on the device"));
  }
  EXPECT_TRUE(SameBytes(net->parameters()[0].cpu(), plain));
}

TEST_F(WeightOffloaderTest, AnOutOfMemoryDeviceIsNamedBeforeAKernelRuns) {
  // The window allows all, the device has room for three units and little else.
  world_.DropSession();
  EmulatedOptions small = MachineOptions();
  small.memory_bytes = 3 * kUnitBytes + (16 << 10);
  EmuWorld world(small, SmallWindows());
  Net net(8);
  auto weights =
      WeightOffloader::Attach(*net, world.device(), world.backend(), Options(100 * kUnitBytes));
  ASSERT_TRUE(weights.ok()) << weights.status();
  {
    const at::NoGradGuard no_grad;
    const Tensor x = Input().to(world.device());
    Net on_cpu(8);
    EXPECT_TRUE(SameBytes(net->forward(x).cpu(), on_cpu->forward(Input())))
        << "others make room for a unit that is needed";
    (*weights)->WithParametersOnHost([] {});  // drops all
    const Tensor hog =
        at::empty({static_cast<int64_t>(2 * kUnitBytes)}, x.options().dtype(at::kByte));
    const Tensor more = at::empty({static_cast<int64_t>(kUnitBytes)}, hog.options());
    EXPECT_THAT(ErrorOf([&] { net->forward(x); }),
                AllOf(HasSubstr("the weights of \"blocks.0\" need " + std::to_string(kUnitBytes)),
                      HasSubstr("no room")));
  }
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(SameBytes(net->forward(Input().to(world.device())).cpu(), Net(8)->forward(Input())))
      << "nothing is lost";
}

// LibTorch's allocator for CUDA gives its cache back, and waits for the device, before it refuses.
TEST_F(WeightOffloaderTest, FetchesAheadForWhichThereIsNoMemoryBecomeRare) {
  constexpr int kLayers = 16;
  Net net(kLayers);
  const auto weights = Attach(*net, 3 * kUnitBytes);
  const Tensor x = X();
  const at::NoGradGuard no_grad;
  const auto run = [&](uint64_t room_bytes, int rounds) {
    weights->WithParametersOnHost([] {});  // the device has none
    EXPECT_THAT(world_.machine().SynchronizeDevice(0), IsOk());
    const uint64_t limit_bytes = world_.device_bytes() + room_bytes;
    EXPECT_THAT(world_.machine().SetMemoryLimit(0, limit_bytes), IsOk());
    const WeightStats before = weights->GetStats();
    for (int round = 0; round < rounds; ++round) net->forward(x);
    WeightStats stats = weights->GetStats();
    stats.fetches_refused -= before.fetches_refused;
    stats.fetched_ahead -= before.fetched_ahead;
    return stats;
  };
  EXPECT_EQ(run(kMiB, 8).fetches_refused, 0u);
  const WeightStats full = run(2 * kUnitBytes - 512, 8);
  EXPECT_GT(full.fetches_refused, 0u);
  EXPECT_LE(full.fetches_refused, 12u) << "each pause is twice as long";
  EXPECT_GT(run(kMiB, 64).fetched_ahead, 8u * kLayers) << "the pause ends";
}

TEST_F(WeightOffloaderTest, ALayerWhoseFetchAheadFindsNoMemoryIsNotResidentAndComesAtItsUse) {
  Net net(8);
  const auto weights = Attach(*net, 3 * kUnitBytes);
  const Tensor x = X();
  const at::NoGradGuard no_grad;
  const Tensor expected = net->forward(x).cpu();
  weights->WithParametersOnHost([] {});  // the device has none
  EXPECT_THAT(world_.machine().SynchronizeDevice(0), IsOk());
  const uint64_t limit_bytes = world_.device_bytes() + 2 * kUnitBytes - 512;
  EXPECT_THAT(world_.machine().SetMemoryLimit(0, limit_bytes), IsOk());
  for (int round = 0; round < 8; ++round) {
    EXPECT_TRUE(SameBytes(net->forward(x).cpu(), expected));
    EXPECT_EQ(weights->GetStats().resident_bytes, kUnitBytes) << round;
  }
  EXPECT_GT(weights->GetStats().fetches_refused, 0u);
}

TEST_F(WeightOffloaderTest, FetchesAheadForWhichTheAllocatorGivesItsCacheBackBecomeRare) {
  constexpr int kLayers = 16;
  CountingAllocator allocator(world_.device().type());
  Net net(kLayers);
  const auto weights = Attach(*net);
  const Tensor x = X();
  const at::NoGradGuard no_grad;
  const auto fetched_ahead = [&](int rounds) {
    const uint64_t before = weights->GetStats().fetched_ahead;
    for (int round = 0; round < rounds; ++round) net->forward(x);
    return weights->GetStats().fetched_ahead - before;
  };
  fetched_ahead(4);  // at first nothing is known
  EXPECT_GT(fetched_ahead(1), kLayers / 2u);
  allocator.is_full = true;
  EXPECT_LE(fetched_ahead(8), 12u) << "each pause is twice as long";
  allocator.is_full = false;
  fetched_ahead(64);
  EXPECT_GT(fetched_ahead(1), kLayers / 2u) << "the pause ends";
}

TEST_F(WeightOffloaderTest, AWindowBelowTheLargestUnitIsRefusedAndNothingIsAttached) {
  Net net(2);
  EXPECT_THAT(AttachError(*net, Options(1000)),
              AllOf(HasSubstr("window_bytes is 1000"), HasSubstr("\"blocks.0\" alone needs"),
                    HasSubstr(std::to_string(kUnitBytes))));
  EXPECT_TRUE(net->parameters()[0].is_cpu());
  net->forward(Input());
}

TEST_F(WeightOffloaderTest, AttachingTwiceIsRefused) {
  Net net(2);
  const auto weights = Attach(*net);
  EXPECT_THAT(AttachError(*net, Options()), HasSubstr("is streamed already"));
  ExpectOutputOf(Net(2), net);
}

TEST_F(WeightOffloaderTest, AForwardWithinAStepThrowsAndTheStepGoesOn) {
  Net net(2);
  const auto weights = Attach(*net);
  const Tensor x = X();
  std::string error;
  weights->Step([&] {
    error = ErrorOf([&] { net->forward(x); });
    const at::NoGradGuard no_grad;
    weights->host_parameters()[0].zero_();
  });
  EXPECT_THAT(error, HasSubstr("are used while WeightOffloader::Step changes weights"));
  EXPECT_EQ(net->parameters()[0].detach().cpu().abs().sum().item<float>(), 0);
}

TEST_F(WeightOffloaderTest, AFrozenWeightThatAStepChangesComesAnew) {
  Net net(2);
  for (Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
  const auto weights = Attach(*net);
  const at::NoGradGuard no_grad;
  const Tensor before = net->forward(X()).cpu();
  weights->Step([&] { weights->host_parameters()[2].mul_(2); });
  Net plain(2);
  plain->parameters()[2].mul_(2);
  EXPECT_FALSE(SameBytes(net->forward(X()).cpu(), before));
  ExpectOutputOf(plain, net);
}

// Trained or frozen, on the device or away: the host's copy is not what the device computes with.
TEST_F(WeightOffloaderTest, AMasterThatIsChangedOutsideAStepIsNamedByTheNextUseOfItsLayer) {
  for (const bool is_trained : {true, false}) {
    SCOPED_TRACE(is_trained);
    Net net(6);
    for (Tensor& parameter : net->parameters()) parameter.requires_grad_(is_trained);
    const auto weights = Attach(*net);
    const at::NoGradGuard no_grad;
    net->forward(X());
    for (const int layer : {0, 5}) {  // of which the window has the second one still
      weights->host_parameters()[2 * layer].mul_(2);
      EXPECT_THAT(ErrorOf([&] { net->forward(X()); }),
                  AllOf(HasSubstr("blocks." + std::to_string(layer) + ".linear.weight was changed"),
                        HasSubstr("within Step")));
      EXPECT_THAT(ErrorOf([&] { net->parameters()[2 * layer].cpu(); }), HasSubstr("was changed"));
      EXPECT_EQ(ErrorOf([&] { net->parameters()[2].cpu(); }), "no error");
      weights->Step([] {});  // takes it over
      Net plain(6);
      for (const int doubled : {0, 5}) {
        if (doubled <= layer) plain->parameters()[2 * doubled].mul_(2);
      }
      ExpectOutputOf(plain, net);
    }
  }
}

// LibTorch's SGD writes through data(), which raises no version.
TEST_F(WeightOffloaderTest, AnOptimizerThatStepsOutsideStepIsNamedByTheNextForward) {
  Net net(3);
  const auto weights = Attach(*net);
  torch::optim::SGD sgd(weights->host_parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::AdamW adam(weights->host_parameters(), torch::optim::AdamWOptions(0.1));
  for (torch::optim::Optimizer* const optimizer :
       std::initializer_list<torch::optim::Optimizer*>{&sgd, &adam}) {
    for (int backwards = 0; backwards < 2; ++backwards) {  // which add up
      net->forward(X(backwards)).pow(2).mean().backward();
    }
    weights->ClipGradNorm(1);
    optimizer->step();
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(ErrorOf([&] { net->forward(X()); }),
                  AllOf(HasSubstr("blocks.0.linear.weight was changed"), HasSubstr("within Step")));
    }
    weights->Step([&] { optimizer->zero_grad(); });  // takes it over
    const Tensor loss = net->forward(X()).pow(2).mean();
    loss.backward();
    weights->Step([&] { optimizer->step(); });
    optimizer->zero_grad();
    EXPECT_LT(net->forward(X()).pow(2).mean().item<float>(), loss.item<float>());
  }
}

// Takes the place of Pinion's hook, so that the gradient stays in the parameter.
struct OwnHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const Tensor&) override {}
};

TEST_F(WeightOffloaderTest, AnOptimizerThatStepsOutsideStepIsNamedWhereverItsGradientsComeFrom) {
  const auto loss = [this](Net& net) { return net->forward(X()).pow(2).mean(); };
  const std::vector<std::function<void(Net&, WeightOffloader&)>> ways = {
      [&](Net& net, WeightOffloader& weights) {
        const Tensors parameters = net->parameters();
        const Tensors gradients = torch::autograd::grad({loss(net)}, parameters);
        for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
        weights.WaitForGradients();
      },
      [&](Net& net, WeightOffloader& weights) {
        for (const Tensor& parameter : net->parameters()) {
          torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<OwnHook>());
        }
        loss(net).backward();
        weights.WaitForGradients();
      },
      [&](Net&, WeightOffloader& weights) {
        for (const Tensor& master : weights.host_parameters()) {
          master.mutable_grad() = at::ones(master.sizes());
        }
        weights.WaitForGradients();
      },
      // An evaluation compares the weights before the optimizer steps.
      [&](Net& net, WeightOffloader&) {
        loss(net).backward();
        const at::NoGradGuard no_grad;
        net->forward(X());
      },
      [&](Net& net, WeightOffloader& weights) {
        loss(net).backward();
        weights.WaitForGradients();
        net->eval();
        net->forward(X());
      },
      [&](Net& net, WeightOffloader& weights) {
        loss(net).backward();
        weights.WithParametersOnHost([] {});
      }};
  for (size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE(way);
    Net net(3);
    const auto weights = Attach(*net);
    torch::optim::SGD sgd(weights->host_parameters(), torch::optim::SGDOptions(0.1));
    ways[way](net, *weights);
    sgd.step();
    EXPECT_THAT(ErrorOf([&] { net->forward(X()); }),
                AllOf(HasSubstr("blocks.0.linear.weight was changed"), HasSubstr("within Step")));
  }
}

// Without an optimizer that reads the gradient.
TEST_F(WeightOffloaderTest, AWriteThroughDataAfterABackwardIsNamedByTheNextForward) {
  Net net(3);
  const auto weights = Attach(*net);
  net->forward(X()).sum().backward();
  weights->host_parameters()[0].variable_data().mul_(2);
  EXPECT_THAT(ErrorOf([&] { net->forward(X()); }), HasSubstr("blocks.0.linear.weight was changed"));
}

// The emulated device has no sparse tensors, so this one is on the host.
TEST_F(WeightOffloaderTest, ASparseGradientIsRefusedByName) {
  const auto host = TorchHostTier(SmallTier(), world_.backend(), world_.device().type());
  ASSERT_THAT(host, IsOk());
  const auto tier = (*host)->ForDevice(0);
  ASSERT_THAT(tier, IsOk());
  const Tensor master = at::zeros({8, 2});
  const StreamedWeight weight = {
      .name = "embedding.weight",
      .parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(master.getIntrusivePtr()),
      .storage = master.storage().getWeakStorageImpl(),
      .master = master,
      .watch = std::make_shared<MasterWatch>("embedding.weight", master)};
  const auto gradients = std::make_shared<HostGradients>(*tier, std::vector{weight},
                                                         /*most_leaving=*/1, /*stay=*/false);
  EXPECT_THAT(ErrorOf([&] {
                gradients->Add(0, at::ones({8, 2}).to_sparse());
              }),
              AllOf(HasSubstr("gradient of embedding.weight"), HasSubstr("sparse=false")));
  EXPECT_FALSE(master.grad().defined());
}

TEST_F(WeightOffloaderTest, WhatWithParametersOnHostChangesIsNoChangeBehindTheDevicesBack) {
  Net net(3);
  const auto weights = Attach(*net);
  const at::NoGradGuard no_grad;
  net->forward(X());
  weights->WithParametersOnHost([&] {
    net->parameters()[0].mul_(2);
    net->parameters()[2].set_data(at::ones({kWidth, kWidth}));
  });
  Net plain(3);
  plain->parameters()[0].mul_(2);
  plain->parameters()[2].fill_(1);
  ExpectOutputOf(plain, net);
}

TEST_F(WeightOffloaderTest, AGraphFromBeforeAStepRaisesAutogradsError) {
  Net net(3);
  const auto weights = Attach(*net);
  const Tensor loss = net->forward(X()).sum();
  weights->Step([&] {
    const at::NoGradGuard no_grad;
    for (Tensor master : weights->host_parameters()) master.mul_(2);
  });
  EXPECT_THAT(ErrorOf([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST_F(WeightOffloaderTest, AGraphFromBeforeParametersWereReplacedOnTheHostRaisesAutogradsError) {
  Net net(3);
  const auto weights = Attach(*net);
  const Tensor loss = net->forward(X()).sum();
  weights->WithParametersOnHost([&] { net->parameters()[2].set_data(at::ones({kWidth, kWidth})); });
  EXPECT_THAT(ErrorOf([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST_F(WeightOffloaderTest, AGradientThatIsSetOnTheHostAfterOthersWereForgottenIsShownInTheModel) {
  Net net(1);
  const auto weights = Attach(*net);
  net->forward(X()).sum().backward();
  weights->WaitForGradients();
  weights->ZeroGrad();
  weights->WaitForGradients();
  Tensor master = weights->host_parameters()[0];
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  master.mutable_grad() = at::ones_like(master);
  weights->WaitForGradients();
  ASSERT_TRUE(net->parameters()[0].grad().defined());
  EXPECT_TRUE(SameBytes(net->parameters()[0].grad().cpu(), at::ones_like(master)));
}

TEST_F(WeightOffloaderTest, LayersThatShareAStorageAreRefusedByName) {
  Net net(2);
  net->parameters()[2].set_data(net->parameters()[0].detach());
  EXPECT_THAT(AttachError(*net, Options()),
              AllOf(HasSubstr("blocks.1.linear.weight shares its storage"),
                    HasSubstr("blocks.0.linear.weight")));
}

TEST_F(WeightOffloaderTest, AnErrorInAStepLeavesTheModelUsable) {
  Net net(2);
  const auto weights = Attach(*net);
  EXPECT_THAT(ErrorOf([&] { weights->Step([] { TORCH_CHECK(false, "no such step"); }); }),
              HasSubstr("no such step"));
  ExpectOutputOf(Net(2), net);
}

TEST_F(WeightOffloaderTest, AParameterThatWasGivenOtherMemoryIsNamedByTheNextStep) {
  Net net(2);
  const auto weights = Attach(*net);
  net->parameters()[1].set_data(at::zeros({kWidth}, at::TensorOptions(world_.device())));
  EXPECT_THAT(ErrorOf([&] { weights->Step([] {}); }),
              HasSubstr("blocks.0.linear.bias was given other memory"));
}

TEST_F(WeightOffloaderTest, FrozenWeightsComeOnceAndOnlyAdaptersSendGradients) {
  struct AdaptedImpl : torch::nn::Module {
    AdaptedImpl()
        : base(register_module("base", torch::nn::Linear(kWidth, kWidth))),
          down(register_module("down", torch::nn::Linear(kWidth, 4))),
          up(register_module("up", torch::nn::Linear(4, kWidth))) {
      for (Tensor& parameter : base->parameters()) parameter.requires_grad_(false);
    }
    Tensor forward(const Tensor& x) { return at::tanh(base(x) + up(down(x))); }
    torch::nn::Linear base, down, up;
  };
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) net->push_back(std::make_shared<AdaptedImpl>());
  const auto weights = Attach(*net, 100 * kUnitBytes);
  torch::optim::SGD optimizer(weights->host_parameters(), 0.1);
  uint64_t adapter_bytes = 0;
  for (const Tensor& master : weights->host_parameters()) {
    if (master.requires_grad()) adapter_bytes += master.nbytes();
  }
  for (int step = 0; step < 3; ++step) {
    net->forward(X()).sum().backward();
    weights->Step([&] { optimizer.step(); });
    optimizer.zero_grad();
  }
  const WeightStats stats = weights->GetStats();
  EXPECT_EQ(stats.fetches, 4u + 4 * 4) << "bases once, adapters in each step, and once ahead";
  EXPECT_GE(stats.gradient_bytes, 3 * adapter_bytes);
  EXPECT_LT(stats.gradient_bytes, 3u * 4 * kUnitBytes / 2) << "none of a base";
}

TEST_F(WeightOffloaderTest, WhateverOfALayerIsFrozenTheGradientsOfTheRestLeaveAtOnceWithOneCopy) {
  Net net(1);
  const auto weights = Attach(*net);
  const auto host = TorchHostTier(SmallTier(), world_.backend(), world_.device().type());
  ASSERT_THAT(host, IsOk());
  const auto tier = (*host)->ForDevice(0);
  ASSERT_THAT(tier, IsOk());
  const auto copies = [&] { return (*tier)->engine().GetStats().d2h.submitted_transfers; };
  for (const bool is_frozen : {false, true, false}) {
    SCOPED_TRACE(is_frozen);
    net->parameters()[1].requires_grad_(!is_frozen);
    weights->WaitForGradients();
    const uint64_t bytes_before = weights->GetStats().gradient_bytes;
    const uint64_t copies_before = copies();
    net->forward(X()).sum().backward();
    EXPECT_EQ(weights->GetStats().gradient_bytes - bytes_before,
              kUnitBytes - (is_frozen ? 512 : 0));
    EXPECT_EQ(copies() - copies_before, 1u);
  }
}

TEST_F(WeightOffloaderTest, TiedWeightsAreOneAndTheirGradientIsTheSum) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl()
        : first(register_module("first", torch::nn::Linear(kWidth, kWidth))),
          second(register_module("second", torch::nn::Linear(kWidth, kWidth))) {
      const at::NoGradGuard no_grad;
      for (Tensor& parameter : parameters()) {
        const Tensor i = at::arange(parameter.numel(), at::kFloat);
        parameter.copy_(at::sin(i * 0.7).view(parameter.sizes()) * 0.1);
      }
      second->weight = second->register_parameter("weight_of_first", first->weight);
    }
    Tensor forward(const Tensor& x) { return second(at::tanh(first(x))); }
    torch::nn::Linear first, second;
  };
  TiedImpl plain;
  plain.forward(Input()).sum().backward();
  TiedImpl net;
  const auto weights = Attach(net);
  net.forward(X()).sum().backward();
  weights->WaitForGradients();
  EXPECT_TRUE(AsOnCpu(weights->host_parameters()[0].grad(), plain.first->weight.grad()));
  EXPECT_EQ(weights->GetStats().fetches, 2u) << "the tied one once, and the second bias";
}

TEST_F(WeightOffloaderTest, TheWeightsOfAPlainFunctionAreAUnitEach) {
  const auto forward = [](const torch::nn::ParameterList& weights, Tensor x) {
    for (const auto& weight : *weights) x = at::tanh(at::matmul(x, weight.value()));
    return x;
  };
  const auto make = [] {
    torch::nn::ParameterList weights;
    for (int n = 0; n < 6; ++n) weights->append((Input(n, kWidth) * 0.1).requires_grad_());
    return weights;
  };
  const torch::nn::ParameterList plain = make();
  forward(plain, Input()).sum().backward();
  torch::nn::ParameterList list = make();
  const auto weights = Attach(*list);
  const uint64_t weight_bytes = kWidth * kWidth * sizeof(float);
  forward(list, X()).sum().backward();
  ExpectGradientsOf(*plain, *weights);
  EXPECT_LE(weights->GetStats().resident_bytes, 2 * weight_bytes) << "two of six at most";
}

TEST_F(WeightOffloaderTest, SeveralRequestsInOnePassFetchEachLayerOnce) {
  Net net(8);
  const auto weights = Attach(*net);
  const at::NoGradGuard no_grad;
  for (int pass = 0; pass < 3; ++pass) {
    Tensors requests = {X(0), X(1), X(2)};
    const uint64_t fetches = weights->GetStats().fetches;
    for (const auto& block : *net->blocks) {
      for (Tensor& request : requests) request = block->as<BlockImpl>()->forward(request);
    }
    EXPECT_LE(weights->GetStats().fetches - fetches, 8u + 2) << "and two for the next pass";
    for (int n = 0; n < 3; ++n) {
      EXPECT_TRUE(AsOnCpu(requests[n].cpu(), Net(8)->forward(Input(n)))) << n;
    }
  }
}

TEST_F(WeightOffloaderTest, AKeptGraphGivesTheSameGradientsAgain) {
  Net net(4);
  const auto weights = Attach(*net);
  const Tensor loss = net->forward(X()).pow(2).mean();
  loss.backward({}, /*retain_graph=*/true);
  weights->WaitForGradients();
  const Tensor once = weights->host_parameters()[0].grad().clone();
  weights->ZeroGrad();
  EXPECT_FALSE(weights->host_parameters()[0].grad().defined());
  loss.backward();
  weights->WaitForGradients();
  EXPECT_TRUE(SameBytes(weights->host_parameters()[0].grad(), once));
}

TEST_F(WeightOffloaderTest, GradientsOfGradientsAreRight) {
  const auto penalty = [](Net& net, const Tensor& x) {
    const Tensor loss = net->forward(x).pow(2).mean();
    const Tensors grads = torch::autograd::grad({loss}, net->parameters(), /*grad_outputs=*/{},
                                                /*retain_graph=*/true, /*create_graph=*/true);
    Tensor sum = loss;
    for (const Tensor& grad : grads) sum = sum + grad.pow(2).sum();
    sum.backward();
  };
  Net plain(3);
  penalty(plain, Input());
  Net net(3);
  const auto weights = Attach(*net);
  penalty(net, X());
  ExpectGradientsOf(*plain, *weights);
}

TEST_F(WeightOffloaderTest, AGradientThatIsThereBeforeIsAddedTo) {
  const auto run = [](Net& net, const Tensor& x) { net->forward(x).sum().backward(); };
  Net plain(2);
  run(plain, Input());
  run(plain, Input(1));
  Net net(2);
  run(net, Input());
  const auto weights = Attach(*net);
  EXPECT_TRUE(SameBytes(net->parameters()[0].grad().cpu(), weights->host_parameters()[0].grad()));
  run(net, X(1));
  ExpectGradientsOf(*plain, *weights);
}

TEST_F(WeightOffloaderTest, ToAddToAGradientTakesTheHostTheTimeOfThreeTensors) {
  Net net(2);
  const auto weights = Attach(*net);
  const auto arithmetic_ms = [&] {
    world_.machine().ResetTimeStats(0);
    net->forward(X()).pow(2).mean().backward();
    weights->WaitForGradients();
    world_.machine().now_ms();  // takes this thread's count
    return world_.machine().time_stats(0).host_arithmetic_ms;
  };
  EXPECT_EQ(arithmetic_ms(), 0) << "the first one stays as it has come";
  const double bytes_per_ms = 1e6 * MachineOptions().preset.host_memory_gb_per_s;
  EXPECT_DOUBLE_EQ(arithmetic_ms(), 3.0 * 2 * kLayerBytes / bytes_per_ms);
}

TEST_F(WeightOffloaderTest, WithoutRoomInPinnedMemoryGradientsComeAllTheSame) {
  world_.DropSession();
  OffloadOptions limited = SmallWindows();
  limited.allocator.max_locked_bytes = 2 << 20;
  EmuWorld world(MachineOptions(), limited);
  Net plain(4);
  plain->forward(Input()).sum().backward();
  Net net(4);
  WeightOptions options = Options();
  options.tier.allocator = limited.allocator;
  const auto weights =
      WeightOffloader::Attach(*net, world.device(), world.backend(), options).value();
  const Tensor loss = net->forward(Input().to(world.device())).sum();
  const auto tier = TorchHostTier(options.tier, world.backend(), world.device().type()).value();
  std::vector<PinnedBlock> hogs;
  for (uint64_t size_bytes = 1 << 20; size_bytes >= 1024; size_bytes /= 2) {
    for (;;) {
      auto hog = tier->pool().Allocate(size_bytes);
      if (!hog.ok()) break;
      hogs.push_back(*std::move(hog));
    }
  }
  loss.backward();
  weights->WaitForGradients();
  EXPECT_EQ(weights->GetStats().gradient_bytes, 0u) << "no parcel had room";
  ExpectGradientsOf(*plain, *weights);
}

TEST_F(WeightOffloaderTest, ClippingOnTheHostIsLibTorchs) {
  Net plain(3);
  plain->forward(Input()).pow(2).sum().backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
  Net net(3);
  const auto weights = Attach(*net);
  net->forward(X()).pow(2).sum().backward();
  EXPECT_NEAR(weights->ClipGradNorm(0.5), norm, TestsRunOnGpu() ? 1e-5 * norm : 0);
  EXPECT_TRUE(AsOnCpu(weights->host_parameters()[2].grad(), plain->parameters()[2].grad()));
}

TEST_F(WeightOffloaderTest, GradientsThatStayAreAddedOnTheDeviceAndLeaveOnceAStep) {
  Net net(4);
  const auto weights = AttachWithGradientsOnDevice(*net);
  torch::optim::AdamW optimizer(weights->host_parameters(), torch::optim::AdamWOptions(0.01));
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    for (int n = 0; n < 3; ++n) {
      const Tensor loss = net->forward(X(step + 10 * n)).pow(2).mean();
      loss.backward();
      trained.losses.push_back(loss.detach().cpu());
      EXPECT_EQ(net->parameters()[0].grad().device(), world_.device());
      EXPECT_EQ(weights->GetStats().gradient_bytes, step * 4 * kUnitBytes) << "none has left";
    }
    weights->Step([&] { optimizer.step(); });
    EXPECT_EQ(weights->GetStats().gradient_bytes, (step + 1) * 4 * kUnitBytes);
    optimizer.zero_grad();
  }
  trained.parameters = CopiesOf(weights->host_parameters());
  // Sums of three are made in the same order on either side.
  ExpectSame(TrainByHand(4, 3, 3), trained);
}

TEST_F(WeightOffloaderTest, GradientsThatStayAreForgottenClippedAndWaitedFor) {
  Net net(3);
  const auto weights = AttachWithGradientsOnDevice(*net);
  net->forward(X(1)).pow(2).mean().backward();
  weights->ZeroGrad();
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  net->forward(X()).pow(2).mean().backward();
  Net other(3);
  const auto reference = Attach(*other);
  other->forward(X()).pow(2).mean().backward();
  EXPECT_EQ(weights->ClipGradNorm(0.01), reference->ClipGradNorm(0.01));
  ExpectSameBytes(GradientsOf(reference->host_parameters()),
                  GradientsOf(weights->host_parameters()));
}

TEST_F(WeightOffloaderTest, GradientHooksOfParametersSeeGradientsOnTheDevice) {
  Net net(2);
  const auto weights = Attach(*net);
  int calls = 0;
  net->parameters()[0].register_hook([&](const Tensor& grad) {
    ++calls;
    EXPECT_EQ(grad.device(), world_.device());
    return grad * 2;
  });
  net->forward(X()).sum().backward();
  Net plain(2);
  plain->parameters()[0].register_hook([](const Tensor& grad) { return grad * 2; });
  plain->forward(Input()).sum().backward();
  ExpectGradientsOf(*plain, *weights);
  EXPECT_EQ(calls, 1);
}

TEST_F(WeightOffloaderTest, InferenceKeepsWhatFitsAndStreamsTheRest) {
  Net net(8);
  const auto weights = Attach(*net, 3 * kUnitBytes);
  for (int request = 0; request < 4; ++request) ExpectOutputOf(Net(8), net);
  EXPECT_LE(weights->GetStats().resident_bytes, 3 * kUnitBytes);
  EXPECT_LE(weights->GetStats().fetches, 4u * 8 + 2);
}

TEST_F(WeightOffloaderTest, UnderAutocastTheCastsAreMadeOfStreamedWeights) {
  const auto run = [&](Net& net, const Tensor& x) {
    const AutocastRegion autocast(x.device().type());
    at::autocast::set_autocast_cache_enabled(false);
    const Tensor y = net->forward(x).pow(2).mean();
    at::autocast::set_autocast_cache_enabled(true);
    return y;
  };
  Net plain(4);
  plain->to(world_.device());
  run(plain, X()).backward();
  Net net(4);
  const auto weights = Attach(*net);
  run(net, X()).backward();
  weights->WaitForGradients();
  ExpectSameBytes(GradientsOf(plain->parameters()), GradientsOf(weights->host_parameters()));
}

// Replays would read weights that may have left the device.
TEST_F(WeightOffloaderTest, AForwardThatIsCapturedIsRefused) {
  Net net(3);
  const auto weights = Attach(*net, /*window_bytes=*/kMiB);
  const c10::Stream side = world_.NewStream();
  const c10::StreamGuard guard(side);
  const StreamHandle stream(side.native_handle());
  const Tensor x = X();
  const at::NoGradGuard no_grad;
  net->forward(x);
  ASSERT_TRUE(world_.Synchronize().ok());
  ASSERT_TRUE(world_.machine().SetCapturing(stream, true).ok());
  const std::string error = ErrorOf([&] { net->forward(x); });
  ASSERT_TRUE(world_.machine().SetCapturing(stream, false).ok());
  EXPECT_THAT(error,
              HasSubstr("a graph is captured, and the weights of \"blocks.0\" are streamed"));
  EXPECT_TRUE(SameBytes(net->forward(x).cpu(), net->forward(x).cpu()));
}

TEST_F(WeightOffloaderTest, AnotherStreamMayUseWhatOneHasFetched) {
  Net net(4);
  const auto weights = Attach(*net);
  const c10::Stream other = world_.NewStream();
  for (int round = 0; round < 3; ++round) {
    ExpectOutputOf(Net(4), net);
    const c10::StreamGuard guard(other);
    ExpectOutputOf(Net(4), net);
  }
  EXPECT_TRUE(world_.Synchronize().ok());
}

// The race detector ends the process if the memory is overwritten early.
TEST_F(WeightOffloaderTest, WhatAStepReplacesIsNotReusedBeforeAnotherStreamHasUsedIt) {
  Net net(2);
  const auto weights = Attach(*net);
  const c10::Stream other = world_.NewStream();
  const at::NoGradGuard no_grad;
  const Tensor x = X();
  ASSERT_TRUE(world_.Synchronize().ok());
  net->forward(x);
  {
    const c10::StreamGuard guard(other);
    net->forward(x);
  }
  weights->Step([&] {
    for (const Tensor& parameter : weights->host_parameters()) parameter.mul_(2);
  });
  net->forward(x);
  EXPECT_TRUE(world_.Synchronize().ok());
}

TEST_F(WeightOffloaderTest, TwoThreadsAskForAnswersAtOnce) {
  Net net(6);
  const auto weights = Attach(*net, 2 * kUnitBytes);
  const Tensor expected = Net(6)->forward(Input()).detach();
  std::vector<std::thread> threads;
  std::vector<int> wrong(2);
  for (int n = 0; n < 2; ++n) {
    threads.emplace_back([&, n] {
      const at::NoGradGuard no_grad;
      for (int request = 0; request < 20; ++request) {
        wrong[n] += AsOnCpu(net->forward(X()).cpu(), expected) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong[0] + wrong[1], 0);
}

// The operator itself may not work there; that is not for whoever counts its arguments to say.
TEST_F(WeightOffloaderTest, SparseTensorsBesideAWeightAreNoneOfItsBusiness) {
  torch::nn::Linear layer(kWidth, kWidth);
  const auto weights = Attach(*layer);
  const Tensor sparse = at::ones({kWidth, kWidth}).to_sparse();
  EXPECT_THAT(ErrorOf([&] { at::mm(sparse, layer->weight); }), Not(HasSubstr("nbytes")));
}

struct BiasTableImpl : torch::nn::Module {
  explicit BiasTableImpl(int64_t rows)
      : table(register_buffer("table", at::arange(rows * kWidth, at::kFloat).view({rows, -1}))) {}
  Tensor forward(const Tensor& x) { return x + table.narrow(0, 0, x.size(0)); }
  Tensor table;
};
TORCH_MODULE(BiasTable);

TEST_F(WeightOffloaderTest, LargeBuffersAreStreamedAndSmallOnesStay) {
  constexpr int64_t kLargeRows = (1 << 20) / (kWidth * sizeof(float));
  BiasTable large(kLargeRows), small(kLargeRows / 2);
  torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), large, small);
  const at::NoGradGuard no_grad;
  const Tensor expected = net->forward(Input());
  const uint64_t held = world_.device_bytes();
  const auto weights = Attach(*net);
  EXPECT_LT(world_.device_bytes() - held, uint64_t{1} << 20) << "the small one alone is there";
  EXPECT_GE(world_.device_bytes() - held, uint64_t{1} << 19);
  EXPECT_TRUE(AsOnCpu(net->forward(X()).cpu(), expected));
  EXPECT_GE(weights->GetStats().fetched_bytes, uint64_t{1} << 20);
}

constexpr int64_t kFeatures = 1 << 18;  // of statistics that are more than the window holds
Tensor TwoRowsOfFeatures() { return Input(0, 2 * kFeatures / kWidth).view({2, kFeatures}); }

// Kernels change them, and no schema tells.
TEST_F(WeightOffloaderTest, RunningStatisticsStayAndAreWhatTrainingMakesOfThem) {
  const auto new_net = [&] {
    torch::nn::Sequential net;
    for (int i = 0; i < 3; ++i) net->push_back(torch::nn::BatchNorm1d(kFeatures));
    return net;
  };
  torch::nn::Sequential resident = new_net(), net = new_net();
  const auto weights = Attach(*net);
  const Tensor x = TwoRowsOfFeatures();
  for (int step = 0; step < 2; ++step) {
    resident->forward(x * step);
    net->forward(x.to(world_.device()) * step);
  }
  EXPECT_GT(weights->GetStats().fetched_bytes, 0u);
  for (const auto& buffer : resident->named_buffers()) {
    EXPECT_TRUE(at::equal(net->named_buffers()[buffer.key()].cpu(), buffer.value()))
        << buffer.key();
  }
}

struct OwnStatisticsImpl : torch::nn::Module {
  explicit OwnStatisticsImpl(int64_t features)
      : mean(register_buffer("mean", at::zeros(features))),
        variance(register_buffer("variance", at::ones(features))) {}
  Tensor forward(const Tensor& x) {
    return at::batch_norm(x, {}, {}, mean, variance, is_training(), 0.1, 1e-5, false);
  }
  Tensor mean, variance;
};
TORCH_MODULE(OwnStatistics);

TEST_F(WeightOffloaderTest, StatisticsOfAnotherNameAreReadAndWhoChangesThemIsToldHow) {
  OwnStatistics net(kFeatures);
  const auto weights = Attach(*net);
  const Tensor x = TwoRowsOfFeatures(), on_device = x.to(world_.device());
  const auto names_the_way = AllOf(HasSubstr("mean"), HasSubstr("WithParametersOnHost"));
  EXPECT_THAT(ErrorOf([&] { net->forward(on_device); }), names_the_way);
  EXPECT_THAT(
      ErrorOf([&] { at::batch_norm_update_stats(on_device, net->mean, net->variance, 0.1); }),
      names_the_way);
  net->eval();
  OwnStatistics resident(kFeatures);
  resident->eval();
  EXPECT_TRUE(AsOnCpu(net->forward(on_device).cpu(), resident->forward(x)));
  EXPECT_GT(weights->GetStats().fetched_bytes, 0u);
}

// By itself, with gradients on the device until the step, and within a target that activations
// share.
TEST_F(WeightOffloaderTest, AThousandStepsLeaveNothingBehind) {
  constexpr uint64_t kTarget = 256 << 10;
  const WeightOptions variants[] = {
      {.tier = SmallTier()},
      {.tier = SmallTier(), .gradients_stay = true},
      {.tier = SmallTier(), .memory_target_bytes = kTarget},
  };
  for (const WeightOptions& options : variants) {
    SCOPED_TRACE(&options - variants);
    const auto session = options.memory_target_bytes == 0 ? world_.session()
                                                          : world_.NewSession(WithTarget(kTarget));
    Net net(4);
    const auto weights = AttachWith(*net, options);
    torch::optim::SGD optimizer(weights->host_parameters(), 0.001);
    int steps = 0;
    const auto step = [&] {
      Tensor loss;
      {
        const OffloadScope scope(session);
        loss = net->forward(X()).pow(2).mean();
      }
      loss.backward();
      weights->Step([&] { optimizer.step(); });
      ++steps % 2 == 0 ? net->zero_grad() : optimizer.zero_grad();
    };
    constexpr int kSteps = 1000;
    for (int n = 0; n < 50; ++n) step();
    const Footprint before = FootprintOf(world_);
    // Less than an object that each step forgets.
    EXPECT_LT(LeastHeapGrowth(world_, kSteps, step), kSteps / 4 * 40);
    const Footprint after = FootprintOf(world_);
    if (session == world_.session()) {
      EXPECT_GT(session->GetStats().offloaded, uint64_t{kSteps});
    }
    EXPECT_GT(weights->GetStats().fetches, uint64_t{kSteps});
    EXPECT_EQ(after.device_bytes, before.device_bytes);
    EXPECT_EQ(after.host_bytes, before.host_bytes);
    EXPECT_EQ(before.handles, 0u);
    EXPECT_EQ(after.handles, 0u);
    EXPECT_EQ(after.events, before.events);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.threads, before.threads);
  }
}

TEST_F(WeightOffloaderTest, TheModelWorksWithoutTheOffloaderThatAttachedIt) {
  Net net(3);
  Attach(*net).reset();
  ExpectOutputOf(Net(3), net);
}

}  // namespace
}  // namespace pinion::testing
