// Wrong uses of the public functions of hooks, a row each. Each ends in an error that names the
// value and the remedy. tests/misuse.md names the tests of all functions.

#include <ATen/core/Tensor.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/no_offload_module.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/tapped_module.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/hooks/checkpoint/checkpoint_module.h"
#include "pinion/hooks/checkpoint/checkpoint_options.h"
#include "pinion/hooks/checkpoint/saved_tensors_hooks.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace hooks_misuse_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Without a working backend, no maker may keep anything.
class BackendMisuseTest : public ::testing::Test {
 protected:
  // Returns the status of everything that is created with a backend.
  std::vector<std::pair<const char*, absl::Status>> MadeWith(const DeviceBackend& backend) {
    return {
        {"OffloadSession", OffloadSession::Create(SmallWindows(), backend).status()},
        {"AttributionSession", AttributionSession::Create(SmallTier(), backend).status()},
        {"WeightOffloader",
         WeightOffloader::Attach(*linear_, world_.device(), backend, {.tier = SmallTier()})
             .status()},
        {"InstallTorchHostAllocator", InstallTorchHostAllocator(SmallTier().allocator, backend)},
        {"StepRecorder", StepRecorder::Create(backend).status()},
    };
  }

  EmuWorld world_;
  const std::string type_ = world_.backend().type_name;
  torch::nn::Linear linear_{4, 4};
};

TEST_F(BackendMisuseTest, ATypeThatIsNoAcceleratorIsRefusedByName) {
  for (const std::string& type : {std::string("cpu"), std::string("meta"), std::string("toaster"),
                                  std::string(), type_ + ":0"}) {
    for (const auto& [maker, status] : MadeWith({type, world_.backend().device})) {
      EXPECT_THAT(status,
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"" + type + "\"")))
          << maker;
    }
    EXPECT_THAT(TorchHostAllocatorStats(type), StatusIs(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(TorchHostMemoryStats(type), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST_F(BackendMisuseTest, ABackendWithoutAFunctionIsRefusedWithTheRemedy) {
  for (const auto& [maker, status] : MadeWith({type_, nullptr})) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 AllOf(HasSubstr("is not set"), HasSubstr("CudaBackend()"))))
        << maker;
  }
}

TEST_F(BackendMisuseTest, WeightsThatASwitchForbidsToStreamNameTheRemedy) {
  ASSERT_EQ(setenv("PINION_DISABLE", "1", /*overwrite=*/1), 0);
  const absl::Status attached =
      WeightOffloader::Attach(*linear_, world_.device(), world_.backend(), {.tier = SmallTier()})
          .status();
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
  EXPECT_THAT(attached, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("PINION_DISABLE=1 in the environment: unset it")));
}

// Takes the makers that make something although nothing is offloaded.
TEST_F(BackendMisuseTest, WhatIsDisabledRefusesTheSame) {
  const auto refuse = [&](const OffloadOptions& options) {
    for (const DeviceBackend& backend :
         {DeviceBackend{"toaster", world_.backend().device}, DeviceBackend{type_, nullptr}}) {
      const absl::Status made[] = {
          OffloadSession::Create(options, backend).status(),
          AttributionSession::Create(SmallTier(), backend).status(),
          InstallTorchHostAllocator(SmallTier().allocator, backend),
      };
      for (const absl::Status& status : made) {
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("\"" + backend.type_name + "\"")));
      }
    }
  };
  OffloadOptions disabled = SmallWindows();
  disabled.enabled = false;
  refuse(disabled);
  ASSERT_EQ(setenv("PINION_DISABLE", "1", /*overwrite=*/1), 0);
  refuse(SmallWindows());
  HostTierOptions bad = SmallTier();
  bad.allocator.segment_bytes = 0;
  const absl::Status made[] = {
      AttributionSession::Create(bad, world_.backend()).status(),
      InstallTorchHostAllocator(bad.allocator, world_.backend()),
  };
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
  for (const absl::Status& status : made) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("segment_bytes")));
  }
}

TEST_F(BackendMisuseTest, ABackendThatReturnsNullIsRefusedWithTheRemedy) {
  const auto null = [](int) -> absl::StatusOr<std::shared_ptr<Device>> { return nullptr; };
  for (const auto& [maker, status] : MadeWith({type_, null})) {
    if (maker == std::string("StepRecorder")) continue;  // it opens its device later
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 AllOf(HasSubstr("returned null for device 0"),
                                       HasSubstr("return NotFound"))))
        << maker;
  }
}

// It would offload nothing.
TEST_F(BackendMisuseTest, ABackendOfAMachineThatIsNotRegisteredIsRefusedWithTheRemedy) {
  world_.machine();  // skips the test on a GPU
  const auto other = EmulatedMachine::Create(MachineOptions()).value();
  for (const auto& [maker, status] : MadeWith(EmulatedBackend(other))) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 AllOf(HasSubstr("of another machine than LibTorch's \"emu\""),
                                       HasSubstr("RegisterEmuDevice"))))
        << maker;
  }
}

// LibTorch's functions for such a type throw.
TEST_F(BackendMisuseTest, ATypeWhoseLibraryIsNotLoadedIsRefusedWithTheRemedy) {
  for (const std::string type : {"cuda", "xpu"}) {
    const c10::Device device(type);
    if (c10::impl::hasDeviceGuardImpl(device.type())) continue;
    const DeviceBackend backend = {type, world_.backend().device};
    const auto attach = [&](uint64_t target_bytes) {
      return WeightOffloader::Attach(*linear_, device, backend,
                                     {.tier = SmallTier(), .memory_target_bytes = target_bytes})
          .status();
    };
    const struct {
      const char* maker;
      std::function<absl::Status()> make;
    } rows[] = {
        {"OffloadSession",
         [&] { return OffloadSession::Create(SmallWindows(), backend).status(); }},
        {"OffloadSession with a target",
         [&] { return OffloadSession::Create(WithTarget(kMiB), backend).status(); }},
        {"AttributionSession",
         [&] { return AttributionSession::Create(SmallTier(), backend).status(); }},
        {"WeightOffloader", [&] { return attach(0); }},
        {"WeightOffloader with a target", [&] { return attach(kMiB); }},
        {"InstallTorchHostAllocator",
         [&] { return InstallTorchHostAllocator(SmallTier().allocator, backend); }},
        {"StepRecorder", [&] { return StepRecorder::Create(backend).status(); }},
    };
    for (const auto& row : rows) {
      absl::Status status;
      EXPECT_EQ(ErrorOf([&] { status = row.make(); }), "no error") << row.maker;
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   AllOf(HasSubstr("\"" + type + "\" is not loaded"),
                                         HasSubstr("libtorch_" + type + ".so"),
                                         HasSubstr("docs/users/install.md"))))
          << row.maker;
    }
  }
}

TEST_F(BackendMisuseTest, ASwitchThatIsNeitherOnNorOffIsNamedByEachThatObeysIt) {
  ASSERT_EQ(setenv("PINION_DISABLE", "maybe", /*overwrite=*/1), 0);
  std::map<std::string, std::string> logs;
  {
    const CapturedLog log;
    EXPECT_THAT(OffloadSession::Create(SmallWindows(), world_.backend()), IsOk());
    logs["OffloadSession"] = log.text();
  }
  {
    const CapturedLog log;
    EXPECT_THAT(AttributionSession::Create(SmallTier(), world_.backend()), IsOk());
    logs["AttributionSession"] = log.text();
  }
  {
    const CapturedLog log;
    EXPECT_THAT(
        WeightOffloader::Attach(*linear_, world_.device(), world_.backend(), {.tier = SmallTier()}),
        IsOk());
    logs["WeightOffloader"] = log.text();
  }
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
  for (const auto& [maker, text] : logs) {
    EXPECT_THAT(text, HasSubstr("PINION_DISABLE=maybe switches nothing on")) << maker;
  }
}

TEST(EmuDeviceMisuseTest, NoMachineIsRefused) {
  EXPECT_THAT(RegisterEmuDevice(nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("needs a machine"), HasSubstr("EmulatedMachine::Create"))));
}

TEST(OffloadSessionMisuseTest, ADeviceThatThereIsNotIsRefusedByReserveAndUnknownToTheOthers) {
  EmuWorld world;
  for (const int index : {-1, 17, 128, 256, INT32_MIN, INT32_MAX}) {
    EXPECT_THAT(world.session()->Reserve(index, 1),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr(":" + std::to_string(index))));
    EXPECT_FALSE(world.session()->GetLink(index).has_value());
    EXPECT_EQ(world.session()->GetEngineStats(index).h2d.submitted_transfers, 0u);
    EXPECT_EQ(world.session()->Explain(index), "");
    world.session()->FreeDeviceMemory(index);
  }
  EXPECT_THAT(world.session()->Reserve(0, UINT64_MAX),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 2^47")));
  for (const uint64_t keep_bytes : {UINT64_MAX, uint64_t{0}}) {
    EXPECT_THAT(world.session()->Trim(keep_bytes), IsOk());
  }
}

TEST(OffloadSessionMisuseTest, ADisabledSessionRefusesADeviceThatLibTorchCannotHave) {
  OffloadOptions options = SmallWindows();
  options.enabled = false;
  EmuWorld world(MachineOptions(), options);
  for (const int index : {-5, 128}) {
    EXPECT_THAT(world.session()->Reserve(index, 1),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr(":" + std::to_string(index))));
  }
  EXPECT_THAT(world.session()->Reserve(0, 1), IsOk());
}

TEST(OffloadScopeMisuseDeathTest, NoSessionNoRecorderAndNoHeadAreNamed) {
  EmuWorld world;
  EXPECT_DEATH(OffloadScope{nullptr},
               "OffloadScope needs a session: pass what OffloadSession::Create");
  EXPECT_DEATH(RecordScope{nullptr}, "RecordScope needs a recorder");
  struct Foreign : StepRecorder {
    absl::StatusOr<std::map<int, StepTrace>> Finish() override {
      return std::map<int, StepTrace>();
    }
  };
  EXPECT_DEATH(RecordScope{std::make_shared<Foreign>()}, "a recorder of StepRecorder::Create");
  torch::nn::Linear linear(4, 4);
  const ModuleHeads heads = {.parts = {{"lm_head", nullptr}}};
  for (const auto& session : {world.session(), world.NewSession(WithTarget(kMiB))}) {
    EXPECT_THAT(ErrorOf([&] { const OffloadScope scope(session, *linear, heads); }),
                AllOf(HasSubstr("the head \"lm_head\" has no module"), HasSubstr("FindHeads")));
  }
  EXPECT_THAT(ErrorOf([&] {
                FindHeads(*linear, {.name_patterns = {"liger", ""}});
              }),
              AllOf(HasSubstr("name_patterns has \"\""), HasSubstr("empty for none")));
}

TEST(ModuleMisuseTest, AWrapperOfNoModuleIsRefused) {
  const torch::nn::Sequential none(nullptr);
  const at::Tensor x = at::ones({1});
  const struct {
    const char* name;
    std::function<void()> make;
    const char* message;
  } rows[] = {
      {"Checkpoint", [&] { nn::Checkpoint{none}; },
       "an empty module holder (torch::nn::SequentialImpl): construct the module"},
      {"NoOffload", [&] { nn::NoOffload{none}; },
       "an empty module holder (torch::nn::SequentialImpl): construct the module"},
      {"Tapped", [] { nn::Tapped("layer", torch::nn::AnyModule()); },
       "nn::Tapped \"layer\" of an empty module holder: construct the module"},
      {"Tapped with a holder", [&] { nn::Tapped("layer", torch::nn::Linear(nullptr)); },
       "nn::Tapped \"layer\" of an empty module holder: construct the module"},
      {"SequentialTaps", [&] { const SequentialTaps taps(none, "features."); },
       "SequentialTaps \"features.\" of an empty module holder: construct the Sequential"},
      {"ModuleTaps", [] { const ModuleTaps taps((torch::nn::SequentialImpl())); },
       "Use std::make_shared"},
      {"checkpoint_sequential", [&] { checkpoint_sequential(none, 1, x); },
       "a Sequential that is empty: give it one module"},
      {"checkpoint_sequential of no modules",
       [&] { checkpoint_sequential(torch::nn::Sequential(), 1, x); },
       "a Sequential that is empty: give it one module"},
  };
  for (const auto& row : rows) EXPECT_THAT(ErrorOf(row.make), HasSubstr(row.message)) << row.name;
}

TEST(CallableMisuseTest, AnEmptyFunctionIsRefusedByName) {
  EmuWorld world;
  torch::nn::Linear linear(4, 4);
  const auto weights =
      WeightOffloader::Attach(*linear, world.device(), world.backend(), {.tier = SmallTier()})
          .value();
  const at::Tensor x = at::ones({1}).requires_grad_();
  using Segment = std::function<at::Tensor(const at::Tensor&)>;
  Segment none;
  at::Tensor (*const null)(const at::Tensor&) = nullptr;
  const auto same = [](const at::Tensor& tensor) { return tensor.detach(); };
  const char* const segment = "the segment of checkpoint() is empty: give";
  const struct {
    const char* name;
    std::function<void()> call;
    const char* message;
  } rows[] = {
      {"a function", [&] { checkpoint(none, x); }, segment},
      {"with options", [&] { checkpoint(CheckpointOptions{.if_planned = true}, none, x); },
       segment},
      {"a reference to one", [&] { checkpoint(std::ref(none), x); }, segment},
      {"a pointer", [&] { checkpoint(null, x); }, segment},
      {"a module", [&] { checkpoint(torch::nn::Linear(nullptr), x); }, segment},
      {"without gradients",
       [&] {
         const at::NoGradGuard no_grad;
         checkpoint(none, x);
       },
       segment},
      {"pack", [&] { const SavedTensorsHooks hooks(none, same); },
       "the pack function of SavedTensorsHooks is empty: give"},
      {"unpack", [&] { const SavedTensorsHooks hooks(same, none); },
       "the unpack function of SavedTensorsHooks is empty: give"},
      {"Step", [&] { weights->Step(std::function<void()>()); }, "the step of Step is empty"},
      {"WithParametersOnHost", [&] { weights->WithParametersOnHost(std::function<void()>()); },
       "the work of WithParametersOnHost is empty"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(ErrorOf(row.call), HasSubstr(row.message)) << row.name;
  }
  at::exp(x).backward();  // packed by nothing
  EXPECT_TRUE(x.grad().equal(at::exp(x.detach())));
}

TEST(DisableSavedTensorsHooksMisuseTest, AnEmptyMessageDisablesAllTheSame) {
  const auto same = [](const at::Tensor& tensor) { return tensor.detach(); };
  const auto open = [&same] { const SavedTensorsHooks hooks(same, same); };
  {
    const DisableSavedTensorsHooks off("");
    EXPECT_NE(ErrorOf(open), "no error");
  }
  EXPECT_EQ(ErrorOf(open), "no error");
}

TEST(WeightOffloaderMisuseTest, ANormThatIsNoneIsRefusedAndNoGradientChanges) {
  EmuWorld world;
  torch::nn::Linear linear(4, 4);
  const auto weights =
      WeightOffloader::Attach(*linear, world.device(), world.backend(), {.tier = SmallTier()})
          .value();
  linear->forward(at::ones({2, 4}).to(world.device())).sum().backward();
  for (const double norm : {-1.0, -kInfinity, kNaN}) {
    EXPECT_THAT(ErrorOf([&] { weights->ClipGradNorm(norm); }),
                AllOf(HasSubstr("ClipGradNorm to a norm of"), HasSubstr("at least 0")));
  }
  weights->WaitForGradients();
  for (const at::Tensor& master : weights->host_parameters()) {
    EXPECT_TRUE(master.grad().equal(at::ones_like(master) * 2));
  }
  EXPECT_GT(weights->ClipGradNorm(kInfinity), 0);
}

TEST(WeightOffloaderMisuseTest, ACallWithinAnotherThatExcludesItIsNamedWithTheOuterOne) {
  EmuWorld world;
  torch::nn::Linear linear(4, 4);
  const auto weights =
      WeightOffloader::Attach(*linear, world.device(), world.backend(), {.tier = SmallTier()})
          .value();
  const std::string step = "WeightOffloader::Step";
  const std::string on_host = "WeightOffloader::WithParametersOnHost";
  const struct {
    std::string name;
    std::function<void()> call;
    bool may_be_in_step;
  } rows[] = {
      {step, [&] { weights->Step([] {}); }, false},
      {on_host, [&] { weights->WithParametersOnHost([] {}); }, false},
      {"WeightOffloader::ClipGradNorm", [&] { weights->ClipGradNorm(1); }, true},
      {"WeightOffloader::WaitForGradients", [&] { weights->WaitForGradients(); }, true},
  };
  const auto refused = [](const std::string& inner, const std::string& outer) {
    return HasSubstr(inner + " was called within " + outer + ": call it after " + outer +
                     " has returned");
  };
  for (const auto& row : rows) {
    linear->forward(at::ones({2, 4}).to(world.device())).sum().backward();
    EXPECT_THAT(ErrorOf([&] { weights->WithParametersOnHost(row.call); }),
                refused(row.name, on_host));
    const std::string in_step = ErrorOf([&] { weights->Step(row.call); });
    if (row.may_be_in_step) {
      EXPECT_EQ(in_step, "no error") << row.name;
    } else {
      EXPECT_THAT(in_step, refused(row.name, step));
    }
    EXPECT_EQ(ErrorOf(row.call), "no error") << row.name << " after the outer call";
  }
}

}  // namespace hooks_misuse_test
}  // namespace pinion::testing
