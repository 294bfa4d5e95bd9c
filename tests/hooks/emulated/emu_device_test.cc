// Checks the emulated device through LibTorch: memory, streams, events, copies, refusals.

#include "pinion/hooks/emulated/emu_device.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/tests/hooks/emulated/emu_device_fixture.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Ne;

// Expects that `compute`, with the same random numbers, returns the same bits on both devices.
void ExpectAsOnCpu(c10::Device device,
                   const std::function<std::vector<at::Tensor>(c10::Device)>& compute) {
  at::manual_seed(1);
  const std::vector<at::Tensor> expected = compute(at::kCPU);
  at::manual_seed(1);
  const std::vector<at::Tensor> actual = compute(device);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].device(), device);
    EXPECT_TRUE(at::equal(actual[i].to(at::kCPU), expected[i])) << i;
  }
}

c10::Stream CurrentStream() {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(c10::Device("emu:0"));
}

// Orders the side stream after what the current stream has been given.
void WaitForCurrentStream(const c10::Stream& side) {
  c10::Event ready(c10::kPrivateUse1);
  ready.record(CurrentStream());
  ready.block(side);
}

// --- The device ---

TEST_F(EmuDeviceTest, TrainsALinearLayer) {
  ExpectAsOnCpu(Emu(1), [](c10::Device device) -> std::vector<at::Tensor> {
    const at::Tensor input = at::randn({8, 16}).to(device);
    const at::Tensor targets = at::randint(4, {8}, at::kLong).to(device);
    at::Tensor weight = at::randn({4, 16}).to(device).requires_grad_(true);
    at::Tensor bias = at::zeros({4}).to(device).requires_grad_(true);
    at::cross_entropy_loss(at::gelu(at::layer_norm(at::linear(input, weight, bias), {4})), targets)
        .backward();
    return {weight.grad(), bias.grad()};
  });
}

TEST_F(EmuDeviceTest, IsNamedEmu) {
  EXPECT_EQ(c10::Device("emu:1"), Emu(1));
  EXPECT_EQ(Emu(1).str(), "emu:1");
}

TEST_F(EmuDeviceTest, PrintsTensors) {
  std::ostringstream text;
  text << at::ones({2}, OnEmu());
  EXPECT_THAT(text.str(), AllOf(HasSubstr("1"), HasSubstr("emuFloatType{2}")));
}

TEST_F(EmuDeviceTest, RefusesADeviceThatTheMachineDoesNotHave) {
  EXPECT_THAT(ErrorOf([] { at::empty({1}, OnEmu(2)); }),
              AllOf(HasSubstr("emu:2"), HasSubstr("2 devices")));
}

TEST_F(EmuDeviceTest, KeepsTheMachineWhileTensorsLive) {
  std::optional<at::Tensor> tensor = at::empty({1}, OnEmu().dtype(at::kByte));
  const double before_ms = machine_->now_ms();
  const absl::Status refused = RegisterEmuDevice(EmulatedMachine::Create(Options()).value());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(" 1 bytes"));
  EXPECT_EQ(RegisteredEmuMachine(), machine_);
  EXPECT_EQ(machine_->now_ms(), before_ms);
  EXPECT_EQ(machine_->calls(DeviceCall::kSynchronize), 0);
  tensor.reset();
  EXPECT_TRUE(RegisterEmuDevice(EmulatedMachine::Create(Options()).value()).ok());
}

TEST_F(EmuDeviceTest, TakesAsManyDevicesAsAMachineMayHave) {
  EXPECT_EQ(RegisterEmuDevice(nullptr).code(), absl::StatusCode::kInvalidArgument);
  EmulatedOptions options = Options();
  options.memory_bytes = 1 << 20;
  options.device_count = 64;
  Use(options);
  EXPECT_EQ(at::ones({4}, OnEmu(63)).sum().item<float>(), 4);
}

// A broken device frees nothing, so an engine leaks the memory of its copies for ever.
TEST_F(EmuDeviceTest, ABrokenMachineIsReplacedThoughTensorsLive) {
  std::optional<at::Tensor> tensor = at::ones({256}, OnEmu());
  machine_->BreakDevice(1, "an error that stays");
  Use(Options());
  Use(Options());
  const at::Tensor other = at::ones({256}, OnEmu());
  EXPECT_EQ(other.sum().item<float>(), 256);
  tensor.reset();
  const absl::Status refused = RegisterEmuDevice(EmulatedMachine::Create(Options()).value());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1024 bytes"));
}

TEST_F(EmuDeviceTest, StreamsOfAnEarlierMachineNameStreamsOfTheNextOne) {
  const c10::Stream stream = NewStream();
  const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
  guard.exchangeStream(stream);
  at::ones({4}, OnEmu());
  Use(Options());
  EXPECT_EQ(guard.getStream(Emu()), guard.getDefaultStream(Emu()));
  const c10::StreamGuard on_stream(stream);
  EXPECT_EQ(at::ones({4}, OnEmu()).sum().item<float>(), 4);
}

// --- Operators ---

at::Tensor TailOnCpu(const at::Tensor& self) { return self.narrow(0, 1, self.size(0) - 1); }
at::Tensor OnesOn(const at::Tensor& like, c10::Device device) {
  TORCH_CHECK(device.is_cpu(), "a kernel of the CPU was given ", device);
  return at::ones_like(like);
}
at::Tensor OnlyMeta(const at::Tensor& self) { return at::empty_like(self); }

torch::Library& TestOperators() {
  static torch::Library* const library = [] {
    auto* const made =
        new torch::Library(torch::Library::DEF, "emu_test", std::nullopt, __FILE__, __LINE__);
    made->def("tail(Tensor(a) self) -> Tensor(a)");
    made->impl("tail", c10::DispatchKey::CPU, &TailOnCpu);
    made->def("ones_on(Tensor like, Device device) -> Tensor");
    made->impl("ones_on", c10::DispatchKey::CPU, &OnesOn);
    made->def("nowhere(Tensor self) -> Tensor");
    made->impl("nowhere", c10::DispatchKey::Meta, &OnlyMeta);
    made->def("view_nowhere(Tensor(a) self) -> Tensor(a)");
    return made;
  }();
  return *library;
}

at::Tensor CallByName(const char* name, const at::Tensor& self) {
  TestOperators();
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&)>()
      .call(self);
}

// A library's file may do this before the file with the definitions is loaded.
TORCH_LIBRARY_IMPL(emu_test_undefined, CPU, library) { library.impl("tail", &TailOnCpu); }

TEST_F(EmuDeviceTest, OperatorsThatNobodyHasDefinedDoNotMatter) {
  const c10::OperatorName name("emu_test_undefined::tail", "");
  EXPECT_THAT(c10::Dispatcher::singleton().getAllOpNames(), Contains(name));
  EXPECT_FALSE(c10::Dispatcher::singleton().findSchema(name).has_value());
}

// A view that falls back to the CPU becomes a copy, and writes to it would be lost silently.
TEST_F(EmuDeviceTest, RefusesAViewWithoutAKernelByName) {
  const at::Tensor tensor = at::ones({4}, OnEmu());
  EXPECT_THAT(ErrorOf([&] { CallByName("emu_test::tail", tensor); }),
              AllOf(HasSubstr("emu_test::tail"), HasSubstr("aliasing")));
}

TEST_F(EmuDeviceTest, RefusesAnOperatorThatTheCpuDoesNotHaveByName) {
  const at::Tensor tensor = at::ones({4}, OnEmu());
  EXPECT_THAT(ErrorOf([&] { CallByName("emu_test::view_nowhere", tensor); }),
              HasSubstr("the CPU has none for emu_test::view_nowhere"));
  EXPECT_THAT(ErrorOf([&] { CallByName("emu_test::nowhere", tensor); }),
              HasSubstr("emu_test::nowhere"));
}

TEST_F(EmuDeviceTest, RefusesToMakeTensorsThatAreNotDenseByName) {
  const at::Tensor tensor = at::ones({4, 4}, OnEmu());
  const at::Tensor leaf = at::ones({4, 4}, OnEmu()).requires_grad_(true);
  const auto refusal = AllOf(HasSubstr("aten::"), HasSubstr("emu has dense tensors only"));
  EXPECT_THAT(ErrorOf([&] { at::_nested_tensor_from_tensor_list({tensor, tensor}); }), refusal);
  EXPECT_THAT(ErrorOf([&] { at::_nested_tensor_from_tensor_list({leaf, leaf}); }), refusal);
  EXPECT_THAT(ErrorOf([&] {
                at::_nested_tensor_from_mask(at::ones({2, 3, 4}, OnEmu()),
                                             at::ones({2, 3}, OnEmu().dtype(at::kBool)));
              }),
              refusal);
  EXPECT_THAT(ErrorOf([&] { at::quantize_per_tensor(tensor, 0.5, 0, at::kQInt8); }), refusal);
  EXPECT_THAT(ErrorOf([&] {
                at::quantize_per_channel(tensor, at::ones({4}, OnEmu()),
                                         at::zeros({4}, OnEmu().dtype(at::kLong)), 0, at::kQInt8);
              }),
              refusal);
  EXPECT_THAT(ErrorOf([&] { tensor.to_sparse(); }), refusal);
  EXPECT_THAT(ErrorOf([&] { tensor.to_sparse_csr(); }), refusal);
  EXPECT_THAT(ErrorOf([&] { tensor.to_mkldnn(); }), refusal);
  const at::Tensor rows = at::arange(5, OnEmu().dtype(at::kLong));
  const at::Tensor columns = at::arange(4, OnEmu().dtype(at::kLong));
  const at::Tensor sparse = at::_sparse_csr_tensor_unsafe(rows, columns, at::ones({4}, OnEmu()),
                                                          {4, 4}, OnEmu().layout(at::kSparseCsr));
  EXPECT_THAT(ErrorOf([&] { at::sparse_sampled_addmm(sparse, tensor, tensor); }), Ne("no error"));
}

TEST_F(EmuDeviceTest, OperatorsOfANestedTensorThatWasMadeFromTheCpusAreErrors) {
  const at::Tensor nested = at::_nested_tensor_from_tensor_list(
      {at::ones({3, 5}), at::ones({2, 5})}, std::nullopt, std::nullopt, Emu());
  ASSERT_TRUE(nested.is_nested());
  for (const bool needs_grad : {false, true}) {
    SCOPED_TRACE(needs_grad);
    nested.requires_grad_(needs_grad);
    EXPECT_THAT(ErrorOf([&] { at::mul(nested, nested); }), HasSubstr("NestedTensoremu"));
    EXPECT_THAT(ErrorOf([&] { nested.clone(); }), HasSubstr("NestedTensoremu"));
    EXPECT_THAT(ErrorOf([&] { nested.select(0, 1); }), HasSubstr("NestedTensoremu"));
    EXPECT_THAT(ErrorOf([&] { nested.unbind(); }), HasSubstr("NestedTensoremu"));
    EXPECT_THAT(ErrorOf([&] { nested.to_padded_tensor(0); }), HasSubstr("NestedTensoremu"));
  }
}

TEST_F(EmuDeviceTest, RefusesToMixDevices) {
  const at::Tensor here = at::ones({4, 4}, OnEmu(0)), there = at::ones({4, 4}, OnEmu(1));
  EXPECT_THAT(ErrorOf([&] { at::mm(here, there); }), Ne("no error"));
  EXPECT_THAT(ErrorOf([&] { at::index_select(here, 0, there.select(0, 0).to(at::kLong)); }),
              Ne("no error"));
}

TEST_F(EmuDeviceTest, RefusesToWriteWhatItReadsElsewhereInTheSameMemory) {
  const auto shift = [](c10::Device device) {
    const at::Tensor base = at::ones({4}).to(device);
    base.narrow(0, 1, 3).add_(base.narrow(0, 0, 3));
  };
  EXPECT_THAT(ErrorOf([&] { shift(at::kCPU); }), HasSubstr("single memory location"));
  EXPECT_THAT(ErrorOf([&] { shift(Emu()); }), HasSubstr("single memory location"));
}

TEST_F(EmuDeviceTest, RefusesCpuTensorsBesideTheDevices) {
  const at::Tensor here = at::ones({4, 4}, OnEmu(0));
  const at::Tensor scalar = at::ones({});
  EXPECT_THAT(ErrorOf([&] { at::mm(here, at::ones({4, 4})); }), HasSubstr("beside those on emu"));
  EXPECT_EQ((here + scalar).sum().item<float>(), 32);  // CPU scalars may be read
  EXPECT_THAT(ErrorOf([&] { at::add_out(const_cast<at::Tensor&>(scalar), here, here); }),
              Ne("no error"));
  EXPECT_THAT(ErrorOf([&] { here + at::ones({}, at::kMeta); }), HasSubstr("meta"));
  const at::Tensor rows = at::tensor({1, 0}, at::kLong), mask = at::ones({4}, at::kBool);
  EXPECT_EQ(here.index({rows}).sum().item<float>(), 8);  // CPU indices may be read too
  EXPECT_EQ(here.index({mask}).sum().item<float>(), 16);
  here.index_put_({rows}, at::zeros({}, OnEmu()));
  EXPECT_EQ(here.sum().item<float>(), 8);
}

TEST_F(EmuDeviceTest, RefusesTensorsOfAThirdDeviceEvenWhereTheCpusMayBe) {
  const at::Tensor here = at::ones({4, 4}, OnEmu());
  const at::Tensor mask = here > 0;
  EXPECT_EQ(at::where(mask, here, at::zeros({})).sum().item<float>(), 16);
  // No build has another device, so this tensor has no memory; tensors on meta go to meta.
  auto elsewhere = c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::XPU),
                                                        here.dtype(), c10::Device(c10::kXPU, 0));
  elsewhere->set_sizes_contiguous({});
  EXPECT_THAT(ErrorOf([&] { at::where(mask, here, at::Tensor(elsewhere)); }),
              HasSubstr("on xpu:0 beside those on emu"));
}

TEST_F(EmuDeviceTest, ViewsShareMemory) {
  const at::Tensor base = at::zeros({4, 6}, OnEmu());
  base.unfold(1, 2, 2).select(2, 0).fill_(1);
  base.t().narrow(0, 1, 1).add_(2);
  base.as_strided({2}, {12}, 5).fill_(3);
  EXPECT_EQ(base.sum().item<float>(), 4 * 3 + 4 * 2 + 2 * 3);
  at::view_as_complex(base.view({4, 3, 2})).zero_();
  EXPECT_EQ(base.sum().item<float>(), 0);
}

TEST_F(EmuDeviceTest, OperatorWhoseKernelFailsDoesNothing) {
  EmulatedOptions options = Options();
  options.faults.calls = {{DeviceCall::kKernel, 2}};
  Use(options);
  at::Tensor tensor = at::ones({4}, OnEmu());  // its fill_ is kernel 1
  EXPECT_THAT(ErrorOf([&] { tensor.add_(1); }),
              AllOf(HasSubstr("aten::add"), HasSubstr("Kernel call 2 failed (injected")));
  EXPECT_TRUE(at::equal(tensor.to(at::kCPU), at::ones({4})));
  tensor.add_(1);
  EXPECT_TRUE(at::equal(tensor.to(at::kCPU), at::full({4}, 2.0)));
}

TEST_F(EmuDeviceTest, OutArgumentsGrow) {
  const at::Tensor a = at::ones({30, 40}, OnEmu());
  at::Tensor out = at::empty({0}, OnEmu());
  at::mul_out(out, a, a);
  EXPECT_EQ(out.sizes(), a.sizes());
  EXPECT_EQ(out.sum().item<float>(), 1200);
  at::Tensor selected = at::empty({0}, OnEmu());
  at::masked_select_out(selected, a, a > 0);
  EXPECT_EQ(selected.sum().item<float>(), 1200);
}

// Collects warnings for its lifetime.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
  const c10::WarningUtils::WarnAlways always_;
};

TEST_F(EmuDeviceTest, LossesHaveTheBitsOfTheCpuAndWarnOfNothing) {
  const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> losses[] = {
      [](const at::Tensor& a, const at::Tensor& b) { return at::mse_loss(a, b); },
      [](const at::Tensor& a, const at::Tensor& b) { return at::smooth_l1_loss(a, b); },
      [](const at::Tensor& a, const at::Tensor& b) { return at::huber_loss(a, b); },
      [](const at::Tensor& a, const at::Tensor& b) { return at::l1_loss(a, b); }};
  for (const auto& loss : losses) {
    const Warnings warnings;
    ExpectAsOnCpu(Emu(1), [&](c10::Device device) -> std::vector<at::Tensor> {
      const at::Tensor leaf = at::randn({7, 5}).to(device).requires_grad_(true);
      const at::Tensor value = loss(leaf, at::randn({7, 5}).to(device));
      value.backward();
      return {value.detach(), leaf.grad()};
    });
    EXPECT_THAT(warnings.texts, IsEmpty());
  }
}

// CUDA has the same rule: an operator may not resize a tensor that aliases a whole storage.
TEST_F(EmuDeviceTest, OutArgumentsOverMemoryOfAnotherOwnerDoNotGrow) {
  const at::Tensor a = at::ones({300}, OnEmu());
  at::Tensor out =
      at::for_blob(a.data_ptr(), {0}).options(OnEmu()).target_device(Emu()).make_tensor();
  EXPECT_THAT(ErrorOf([&] { at::mul_out(out, a, a); }), HasSubstr("cannot"));
}

TEST_F(EmuDeviceTest, OutArgumentsComeBackInTheirOrder) {
  const at::Tensor values = at::ones({2, 3}, OnEmu());
  const at::Tensor first = at::empty({0}, OnEmu());
  const at::Tensor second = at::empty({0}, OnEmu().dtype(at::kLong));
  torch::jit::Stack stack = {values, 1, false, first, second};
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::max", "dim_max").callBoxed(stack);
  ASSERT_EQ(stack.size(), 2);
  EXPECT_TRUE(stack[0].toTensor().is_same(first));
  EXPECT_TRUE(stack[1].toTensor().is_same(second));
}

TEST_F(EmuDeviceTest, ResultsInAListAreOnTheDevice) {
  ExpectAsOnCpu(Emu(1), [](c10::Device device) {
    return at::_histogramdd_bin_edges(at::arange(20, at::kFloat).view({10, 2}).to(device), {3, 4});
  });
}

TEST_F(EmuDeviceTest, AKernelOfTheCpuThatTakesADeviceIsGivenTheCpu) {
  TestOperators();
  const at::Tensor made = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("emu_test::ones_on", "")
                              .typed<at::Tensor(const at::Tensor&, c10::Device)>()
                              .call(at::zeros({3}, OnEmu(1)), Emu(1));
  EXPECT_EQ(made.device(), Emu(1));
  EXPECT_EQ(made.sum().item<float>(), 3);
}

TEST_F(EmuDeviceTest, ADetachedTensorIsChangedInPlace) {
  const at::Tensor tensor = at::ones({4}, OnEmu());
  tensor.variable_data().add_(1);
  EXPECT_EQ(tensor.sum().item<float>(), 8);
}

TEST_F(EmuDeviceTest, ANumberDoesNotWidenTheResult) {
  const at::Tensor half = at::ones({}, OnEmu().dtype(at::kHalf));
  EXPECT_EQ(at::where(half > 0, half, 2.0).scalar_type(), at::kHalf);
}

// Solvers transpose their result and set its conjugate bit, in place.
TEST_F(EmuDeviceTest, ResultsMayBeConjugatedLazily) {
  ExpectAsOnCpu(Emu(), [](c10::Device device) -> std::vector<at::Tensor> {
    const at::Tensor matrix = at::randn({3, 3}, at::kComplexDouble).to(device);
    const at::Tensor right = at::randn({3, 3}, at::kComplexDouble).to(device);
    const auto [lu, pivots, info] = at::linalg_lu_factor_ex(matrix);
    return {at::linalg_lu_solve(lu, pivots, right, /*left=*/false)};
  });
}

TEST_F(EmuDeviceTest, ZerosWithoutMemoryAreZeros) {
  const at::Tensor ones = at::ones({4}, OnEmu());
  const at::Tensor zeros = at::_efficientzerotensor({4}, ones.options());
  EXPECT_TRUE((ones * zeros)._is_zerotensor());
  EXPECT_EQ((ones + zeros).sum().item<float>(), 4);
  EXPECT_EQ(zeros.to(at::kCPU).sum().item<float>(), 0);
  const at::Tensor leaf = at::randn({4}, OnEmu()).requires_grad_(true);
  leaf.sgn().sum().backward();
  EXPECT_EQ(leaf.grad().abs().sum().item<float>(), 0);
}

// Models choose CUDA's path on any device but the CPU, with dtypes for which the CPU has no kernel.
TEST_F(EmuDeviceTest, TypesThatOnlyCudaHasAreComputedInAWiderOne) {
  const at::Tensor values = at::randint(100, {1000}, at::kLong);
  const at::Tensor counts = values.to(Emu()).histc(7, 0, 99);
  EXPECT_EQ(counts.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(counts.to(at::kCPU), values.to(at::kDouble).histc(7, 0, 99).to(at::kLong)));
  at::Tensor out = at::empty({0}, OnEmu().dtype(at::kLong));
  at::histc_out(out, values.to(Emu()), 7, 0, 99);
  EXPECT_TRUE(at::equal(out.to(at::kCPU), counts.to(at::kCPU)));

  const at::Tensor image = at::randn({1, 2, 4, 4, 4}).to(at::kBFloat16);
  const at::Tensor leaf = image.to(Emu()).requires_grad_(true);
  const at::Tensor pooled = at::avg_pool3d(leaf, {2, 2, 2});
  pooled.sum().backward();
  EXPECT_TRUE(at::equal(pooled.detach().to(at::kCPU),
                        at::avg_pool3d(image.to(at::kFloat), {2, 2, 2}).to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(leaf.grad().to(at::kCPU), at::full_like(image, 0.125)));

  const at::Tensor square = at::randn({3, 3}).to(at::kHalf);
  EXPECT_TRUE(at::equal(square.to(Emu()).trace().to(at::kCPU),
                        square.to(at::kFloat).trace().to(at::kHalf)));
  const at::Tensor flags = at::ones({3}, OnEmu().dtype(at::kBool));
  EXPECT_THAT(ErrorOf([&] { flags.histc(7, 0, 99); }), Ne("no error"));  // an error on CUDA too
}

TEST_F(EmuDeviceTest, DropoutOfEverythingHasNoGradient) {
  const at::Tensor mask = at::ones({4}, OnEmu().dtype(at::kBool));
  const at::Tensor grad = at::native_dropout_backward(at::ones({4}, OnEmu()), mask, /*scale=*/0);
  EXPECT_EQ(grad.abs().sum().item<float>(), 0);
  const auto [output, dropped] = at::native_dropout(at::ones({4}, OnEmu()), 1.0, true);
  EXPECT_EQ(output.abs().sum().item<float>(), 0);
  EXPECT_FALSE(dropped.any().item<bool>());
}

TEST_F(EmuDeviceTest, DropoutOutsideOfTrainingKeepsAll) {
  const auto [output, mask] = at::native_dropout(at::ones({4}, OnEmu()), 0.9, /*train=*/false);
  EXPECT_EQ(output.sum().item<float>(), 4);
  EXPECT_TRUE(mask.all().item<bool>());
  at::manual_seed(1);
  const auto kept = std::get<1>(at::native_dropout(at::ones({64}, OnEmu()), 0.9, std::nullopt));
  EXPECT_LT(kept.sum().item<int64_t>(), 32);  // undefined `train` means training
}

TEST_F(EmuDeviceTest, ItemWaitsForTheDevice) {
  const at::Tensor a = at::ones({512, 512}, OnEmu());
  const at::Tensor product = at::mm(a, a);
  const double before_ms = machine_->now_ms();
  EXPECT_EQ(product.select(0, 0).select(0, 0).item<float>(), 512);
  EXPECT_GT(machine_->now_ms(), before_ms);
  EXPECT_GT(machine_->time_stats(0).compute_busy_ms, 0);
  machine_->ResetTimeStats(0);
  EXPECT_EQ(machine_->SynchronizeDevice(0), absl::OkStatus());
  EXPECT_EQ(machine_->time_stats(0).compute_busy_ms, 0);  // no work was pending
}

// Kernels read the bytes of earlier copies, although copies take effect as late as possible.
TEST_F(EmuDeviceTest, KernelsOfEveryKindSeeTheCopiesBeforeThem) {
  const at::Tensor host = Pinned({64}).fill_(1);
  const auto late = [&] { return host.to(Emu(), /*non_blocking=*/true); };
  const at::Tensor mask = at::ones({64}, OnEmu().dtype(at::kBool));
  EXPECT_EQ(late().select(0, 63).item<float>(), 1);
  EXPECT_EQ(at::empty({64}, OnEmu()).copy_(late()).sum().item<float>(), 64);
  EXPECT_EQ(std::get<0>(at::native_dropout(late(), 0.5, false)).sum().item<float>(), 64);
  EXPECT_EQ(at::native_dropout_backward(late(), mask, 1).sum().item<float>(), 64);
  at::Tensor grown = late();
  grown.resize_({65});
  EXPECT_EQ(grown.narrow(0, 0, 64).sum().item<float>(), 64);
}

TEST_F(EmuDeviceTest, TheHostWaitsForWhatItNeedsToKnow) {
  const at::Tensor a = at::ones({4}, OnEmu()), host = Pinned({1 << 20});
  const at::Tensor rows = at::ones({1}, OnEmu().dtype(at::kLong)), same = a.clone();
  const at::Tensor bytes = a.to(at::kByte), flags = a.to(at::kBool);
  const at::Tensor points = at::ones({4, 2}, OnEmu());
  const struct {
    const char* name;
    bool waits;
    std::function<void()> run;
  } cases[] = {{"item", true, [&] { a.select(0, 0).item(); }},
               {"equal", true, [&] { at::equal(a, same); }},
               {"nonzero", true, [&] { a.nonzero(); }},
               {"masked_select", true, [&] { a.masked_select(flags); }},
               {"_unique2", true, [&] { at::_unique2(a); }},
               {"bincount", true, [&] { at::bincount(rows); }},
               {"repeat_interleave", true, [&] { at::repeat_interleave(rows); }},
               {"a mask", true, [&] { a.index({flags}); }},
               {"a mask of bytes", true, [&] { a.index({bytes}); }},
               {"to write by a mask", true, [&] { a.index_put_({flags}, same); }},
               {"to the host", true, [&] { a.to(at::kCPU); }},
               {"positions", false, [&] { a.index({rows}); }},
               {"add", false, [&] { a + same; }},
               {"a list", false,
                [&] {
                  at::_foreach_add({a, same}, 1);
                }},
               {"a list of one operator", false, [&] {
                  at::_histogramdd_bin_edges(points, {3, 4});
                }}};
  for (const auto& item : cases) {
    ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
    host.to(Emu(), /*non_blocking=*/true);
    const double before_ms = machine_->now_ms();
    item.run();
    const double waited_ms = machine_->now_ms() - before_ms;
    ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
    const double total_ms = machine_->now_ms() - before_ms;
    EXPECT_EQ(waited_ms > total_ms / 2, item.waits)
        << item.name << ": " << waited_ms << " of " << total_ms << " ms";
  }
}

// CUDA's lists: cast to bfloat16, cast to float, promote to the widest argument, or unchanged.
TEST_F(EmuDeviceTest, AutocastHasTheListsOfCuda) {
  const at::Tensor wide = at::ones({4, 4}, OnEmu()), narrow = wide.to(at::kBFloat16);
  at::autocast::set_autocast_enabled(Emu().type(), true);
  at::autocast::set_autocast_dtype(Emu().type(), at::kBFloat16);
  EXPECT_EQ(at::mm(wide, wide).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::exp(narrow).scalar_type(), at::kFloat);
  EXPECT_EQ(at::softmax(narrow, -1).scalar_type(), at::kFloat);
  EXPECT_EQ(at::norm(narrow, 2).scalar_type(), at::kFloat);
  EXPECT_EQ(at::dot(narrow.select(0, 0), wide.select(0, 0)).scalar_type(), at::kFloat);
  EXPECT_EQ(at::relu(narrow).scalar_type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(Emu().type(), false);
  at::autocast::clear_cache();
}

TEST_F(EmuDeviceTest, AMatrixProductCostsItsFlops) {
  const at::Tensor a = at::ones({256, 128}, OnEmu()), b = at::ones({128, 512}, OnEmu());
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  machine_->ResetTimeStats(0);
  at::mm(a, b);
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  const double bytes = 4.0 * (256 * 128 + 128 * 512 + 256 * 512);
  EXPECT_NEAR(
      machine_->time_stats(0).compute_busy_ms,
      KernelMs(machine_->options().preset, 2.0 * 256 * 128 * 512, bytes, ComputeType::kFloat32),
      1e-6);
  EXPECT_EQ(machine_->time_stats(0).kernels, 1);
}

TEST_F(EmuDeviceTest, AttentionNeverHoldsTheMatrixOfScores) {
  constexpr int64_t kLength = 512;
  at::Tensor qkv[3];
  for (at::Tensor& part : qkv) {
    part = at::randn({1, 2, kLength, 8}, OnEmu()).requires_grad_(true);
  }
  machine_->ResetPeakMemory(0);
  at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true)
      .sum()
      .backward();
  EXPECT_LT(machine_->memory_stats(0).peak_bytes, 2 * kLength * kLength * sizeof(float));
}

TEST_F(EmuDeviceTest, RunsOnManyThreads) {
  std::vector<std::thread> threads;
  std::vector<float> sums(4);
  for (size_t i = 0; i < sums.size(); ++i) {
    threads.emplace_back([i, &sums] {
      at::Tensor value = at::zeros({64}, OnEmu(static_cast<int>(i % 2)));
      for (int step = 0; step < 50; ++step) value = value + 1;
      sums[i] = value.sum().item<float>();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(sums, ::testing::Each(Eq(64 * 50)));
}

TEST_F(EmuDeviceTest, DrawsFromAGeneratorOfItsOwn) {
  at::manual_seed(5);
  const at::Tensor on_cpu = at::randn({4});
  const at::Tensor on_device = at::randn({4}, OnEmu());
  EXPECT_TRUE(at::equal(on_device.to(at::kCPU), on_cpu));
  EXPECT_FALSE(at::equal(at::randn({4}, OnEmu()).to(at::kCPU), on_cpu));
  EXPECT_TRUE(at::equal(at::randn({4}, OnEmu(1)).to(at::kCPU), on_cpu));
}

// --- Recurrent layers ---

// Returns an LSTM's outputs, without biases; hidden and cell state are the same tensor.
at::Tensor Lstm(const at::Tensor& input, const at::Tensor& hidden, double dropout = 0) {
  const int64_t layers = hidden.size(0), width = hidden.size(2);
  std::vector<at::Tensor> weights;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const int64_t columns : {layer == 0 ? input.size(2) : width, width}) {
      weights.push_back(at::randn({4 * width, columns}).to(input.device()));
    }
  }
  return std::get<0>(at::lstm(input, {hidden, hidden}, weights, /*has_biases=*/false, layers,
                              dropout, /*train=*/true, /*bidirectional=*/false,
                              /*batch_first=*/false));
}

TEST_F(EmuDeviceTest, AutocastOfTheCpuReachesNoKernelOfEmu) {
  const at::Tensor points = at::randn({40, 8}).to(Emu());
  const at::Tensor input = at::randn({3, 2, 4}).to(Emu());
  const auto compute = [&] {
    at::manual_seed(3);
    const at::Tensor distances = at::cdist(points, points, /*p=*/2, /*compute_mode=*/1);
    const at::Tensor states = Lstm(input, at::zeros({1, 2, 4}, OnEmu()));
    return at::cat({distances.to(at::kCPU).flatten(), states.to(at::kCPU).flatten()});
  };
  const at::Tensor expected = compute();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor actual = compute();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(at::equal(actual, expected));
}

TEST_F(EmuDeviceTest, AStateThatIsGivenTwiceHasTheGradientOfBoth) {
  ExpectAsOnCpu(Emu(), [](c10::Device device) -> std::vector<at::Tensor> {
    const at::Tensor input = at::randn({5, 2, 3}).to(device);
    const at::Tensor hidden = at::randn({1, 2, 4}).to(device).requires_grad_(true);
    Lstm(input, hidden).sum().backward();
    return {hidden.grad()};
  });
}

// Modules without biases pass undefined tensors.
TEST_F(EmuDeviceTest, ACellMayHaveNoBiases) {
  ExpectAsOnCpu(Emu(), [](c10::Device device) -> std::vector<at::Tensor> {
    const at::Tensor input = at::randn({2, 3}).to(device).requires_grad_(true);
    const at::Tensor hidden = at::randn({2, 4}).to(device);
    const at::Tensor from_input = at::randn({12, 3}).to(device);
    const at::Tensor from_hidden = at::randn({12, 4}).to(device);
    at::gru_cell(input, hidden, from_input, from_hidden, at::Tensor(), at::Tensor())
        .sum()
        .backward();
    return {input.grad()};
  });
}

TEST_F(EmuDeviceTest, BackwardThroughDropoutBetweenLayersLeavesTheCpusGeneratorAlone) {
  const at::Tensor input = at::ones({5, 2, 4}, OnEmu()).requires_grad_(true);
  const at::Tensor out = Lstm(input, at::zeros({2, 2, 4}, OnEmu()), /*dropout=*/0.5);
  at::rand({1});
  const at::Generator& generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor state = generator.get_state().clone();
  out.sum().backward();
  EXPECT_TRUE(at::equal(generator.get_state(), state));
}

TEST_F(EmuDeviceTest, RecurrentLayersHaveNoDoubleBackward) {
  const at::Tensor input = at::ones({5, 2, 4}, OnEmu()).requires_grad_(true);
  const at::Tensor out = Lstm(input, at::zeros({1, 2, 4}, OnEmu())).sum();
  EXPECT_THAT(ErrorOf([&] { out.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
              HasSubstr("no double backward"));
}

TEST_F(EmuDeviceTest, RecurrentBackwardSeesTheCopyOfItsGradient) {
  const auto gradient = [&](const at::Tensor& host) {
    at::manual_seed(1);
    const at::Tensor input = at::ones({5, 2, 4}, OnEmu()).requires_grad_(true);
    const at::Tensor out = Lstm(input, at::zeros({1, 2, 4}, OnEmu()));
    out.backward(host.to(Emu(), /*non_blocking=*/true));
    return input.grad().to(at::kCPU);
  };
  const at::Tensor host = Pinned({5, 2, 4});
  EXPECT_TRUE(at::equal(gradient(host), gradient(host.clone())));
}

// --- Memory ---

TEST_F(EmuDeviceTest, OutOfMemoryNamesWhoHoldsWhat) {
  const at::Tensor a = at::ones({1024, 1024}, OnEmu());
  std::vector<at::Tensor> held;
  {
    const AllocationLabel label("optimizer state");
    for (int i = 0; i < 8; ++i) held.push_back(at::empty({1 << 20}, OnEmu()));
  }
  std::string message;
  try {
    for (int i = 0; i < 100; ++i) held.push_back(at::mm(a, a));
  } catch (const c10::OutOfMemoryError& error) {
    message = error.what_without_backtrace();
  }
  EXPECT_THAT(message, AllOf(HasSubstr("aten::mm"), HasSubstr("optimizer state")));
  held.clear();
  EXPECT_EQ(at::mm(a, a).select(0, 0).select(0, 0).item<float>(), 1024);  // the device still works
}

TEST_F(EmuDeviceTest, OnlyTensorsOfTheCpuArePinned) {
  EXPECT_THAT(ErrorOf([] { at::empty({4}, OnEmu().pinned_memory(true)); }), HasSubstr("pinned"));
}

TEST_F(EmuDeviceTest, TensorsHaveTheStridesOfTheirMemoryFormat) {
  const std::vector<int64_t> sizes = {2, 3, 4, 5};
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor expected = at::empty(sizes, at::kFloat, format);
    EXPECT_EQ(at::empty(sizes, OnEmu().memory_format(format)).strides(), expected.strides());
    EXPECT_EQ(at::empty(sizes, OnEmu()).resize_(sizes, format).strides(), expected.strides());
    EXPECT_EQ(at::empty({0}, OnEmu()).resize_(sizes, format).strides(), expected.strides());
  }
  const at::Tensor transposed = at::ones({2, 3}, OnEmu()).t();
  EXPECT_EQ(transposed.resize_({3, 2}).strides(), at::IntArrayRef({1, 3}));
  EXPECT_EQ(transposed.resize_({2, 3}).strides(), at::IntArrayRef({3, 1}));
}

TEST_F(EmuDeviceTest, AStorageThatIsLargeEnoughStays) {
  const at::Tensor tensor = at::ones({8}, OnEmu());
  const void* const data = tensor.data_ptr();
  tensor.resize_({2});
  tensor.resize_({8});
  EXPECT_EQ(tensor.data_ptr(), data);
  at::Tensor other = at::empty({0}, OnEmu());
  other.set_(tensor.storage(), 2, {6}, {1});
  EXPECT_EQ(other.data_ptr(), tensor.narrow(0, 2, 1).data_ptr());
  EXPECT_EQ(tensor.data_ptr(), data);
  const uint64_t copies = machine_->calls(DeviceCall::kCopy);
  at::empty({0}, OnEmu()).resize_({8});
  EXPECT_EQ(machine_->calls(DeviceCall::kCopy), copies);  // nothing to preserve
}

TEST_F(EmuDeviceTest, SetTakesAStorageAndMakesItLargeEnough) {
  const at::Tensor owner = at::ones({8}, OnEmu());
  at::Tensor tensor = at::empty({0}, OnEmu());
  tensor.set_(owner.storage());
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({8}));
  tensor.set_(owner.storage(), 4, {3, 2}, {2, 1});
  EXPECT_EQ(owner.storage().nbytes(), 4 * 10);
  tensor.fill_(2);
  EXPECT_EQ(owner.sum().item<float>(), 4 + 2 * 4);
  tensor.set_(owner.storage(), 4, {8});
  EXPECT_EQ(owner.storage().nbytes(), 4 * 12);
  tensor.set_();
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({0}));
  EXPECT_EQ(tensor.storage().nbytes(), 0);
  tensor.resize_({4}).fill_(1);
  EXPECT_EQ(tensor.sum().item<float>(), 4);
}

TEST_F(EmuDeviceTest, SetMakesAStorageLargeEnoughForStridesWithGaps) {
  const auto widened = [](c10::Device device) {
    const at::Tensor owner = at::ones({8}).to(device);
    at::Tensor tensor = at::empty({0}, owner.options());
    tensor.set_(owner.storage(), 4, {3, 2}, {4, 1}).fill_(2);
    return owner.set_(owner.storage());
  };
  const at::Tensor expected = widened(at::kCPU), actual = widened(Emu(1));
  EXPECT_EQ(actual.storage().nbytes(), expected.storage().nbytes());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(machine_->memory_stats(1).in_use_bytes, AllocationBytes(actual.storage().nbytes()));
  for (const int64_t written : {4, 5, 8, 9, 12, 13}) {
    EXPECT_EQ(actual[written].item<float>(), 2) << written;
  }
  EXPECT_EQ(actual.narrow(0, 0, 4).sum().item<float>(), 4);
}

TEST_F(EmuDeviceTest, SetWithoutArgumentsLeavesTheStorageToOtherTensors) {
  const at::Tensor owner = at::ones({8}, OnEmu()), tensor = owner.view({2, 4});
  const void* const data = owner.data_ptr();
  at::Tensor(tensor).set_();
  EXPECT_EQ(tensor.numel(), 0);
  EXPECT_EQ(owner.data_ptr(), data);
  EXPECT_EQ(owner.sum().item<float>(), 8);
}

TEST_F(EmuDeviceTest, NoElementsTakeNoMemoryWhateverTheirStrides) {
  const uint64_t before = machine_->memory_stats(0).allocations;
  for (const auto& sizes : {std::vector<int64_t>{3, 0}, {0, 3}, {2, 0, 3}}) {
    const at::Tensor like_on_cpu = at::empty(sizes);
    const at::Tensor none = at::empty_strided(sizes, like_on_cpu.strides(), OnEmu());
    EXPECT_EQ(none.sizes(), like_on_cpu.sizes());
    EXPECT_EQ(none.storage().nbytes(), 0);
  }
  EXPECT_EQ(machine_->memory_stats(0).allocations, before);
}

TEST_F(EmuDeviceTest, StoragesResize) {
  const at::Tensor tensor = at::arange(8, OnEmu());
  tensor.resize_({1000});
  EXPECT_EQ(tensor.narrow(0, 0, 8).sum().item<int64_t>(), 28);
  at::Tensor other = at::empty({0}, tensor.options());
  other.set_(tensor);
  other.fill_(1);
  EXPECT_EQ(tensor.sum().item<int64_t>(), 1000);
}

// --- Streams ---

TEST_F(EmuDeviceTest, AnEventOrdersStreams) {
  const c10::Stream side = NewStream();
  const at::Tensor made = at::ones({1024}, OnEmu());
  WaitForCurrentStream(side);
  {
    const c10::StreamGuard guard(side);
    EXPECT_EQ(made.sum().item<float>(), 1024);
  }
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmuDeviceTest, AMissingEventIsARace) {
  const c10::Stream side = NewStream();
  const at::Tensor made = at::ones({1024}, OnEmu());
  const c10::StreamGuard guard(side);
  made + 1;
  EXPECT_THAT(machine_->races(), Contains(HasSubstr("aten::add")));
}

TEST_F(EmuDeviceTest, AFreshResultIsWrittenByItsOperator) {
  const c10::Stream side = NewStream();
  const at::Tensor made =
      at::index_select(at::ones({8}, OnEmu()), 0, at::zeros({2}, OnEmu().dtype(at::kLong)));
  const c10::StreamGuard guard(side);
  made + 1;
  EXPECT_THAT(machine_->races(), Contains(HasSubstr("aten::index_select")));
}

TEST_F(EmuDeviceTest, StreamsMayReadTheSameAndWriteBesideEachOther) {
  const c10::Stream side = NewStream();
  const at::Tensor made = at::ones({8}, OnEmu());
  const at::Tensor front = made.narrow(0, 0, 4), back = made.narrow(0, 4, 4);
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  back.sum();
  back.clone();
  front.add_(1);
  {
    const c10::StreamGuard guard(side);
    back.sum();
    back.clone();
  }
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  front.add_(1);
  {
    const c10::StreamGuard guard(side);
    back.add_(1);
  }
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmuDeviceTest, RecordStreamKeepsMemoryForTheOtherStream) {
  for (const bool record : {true, false}) {
    Use(Options());
    const c10::Stream side = NewStream();
    at::Tensor used = at::ones({1024}, OnEmu());
    side.synchronize();
    WaitForCurrentStream(side);
    {
      const c10::StreamGuard guard(side);
      used + 1;
    }
    if (record) used.record_stream(side);
    used.reset();
    EXPECT_EQ(machine_->races().empty(), record);
  }
}

TEST_F(EmuDeviceTest, BackwardRunsOnTheStreamOfForward) {
  const c10::Stream side = NewStream();
  at::Tensor grad;
  {
    const c10::StreamGuard guard(side);
    const at::Tensor leaf = at::ones({64}, OnEmu()).requires_grad_(true);
    leaf.mul(3).sum().backward();
    grad = leaf.grad();
    EXPECT_EQ(grad.sum().item<float>(), 192);
  }
  EXPECT_THAT(machine_->races(), IsEmpty());
}

// --- Copies ---

TEST_F(EmuDeviceTest, APinnedCopyIsAsynchronous) {
  const at::Tensor host = Pinned({1 << 20});
  ASSERT_TRUE(host.is_pinned());
  const double before_ms = machine_->now_ms();
  const at::Tensor copy = host.to(Emu(), /*non_blocking=*/true);
  const double submitted_ms = machine_->now_ms();
  ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
  EXPECT_LT(submitted_ms - before_ms, (machine_->now_ms() - before_ms) / 2);
  EXPECT_TRUE(at::equal(copy.to(at::kCPU), host));
}

TEST_F(EmuDeviceTest, ABlockingCopyOfPinnedMemoryIsDoneWhateverTheLayout) {
  const at::Tensor host = Pinned({1 << 18, 4});
  const at::Tensor columns = at::empty({1 << 18, 8}, OnEmu()).narrow(1, 0, 4);
  const double before_ms = machine_->now_ms();
  columns.copy_(host);
  EXPECT_GE(machine_->now_ms() - before_ms,
            (4 << 20) / (machine_->options().preset.link.h2d_gb_per_s * 1e6));
}

TEST_F(EmuDeviceTest, PinnedMemoryOutlivesItsTensorUntilTheCopyIsDone) {
  at::Tensor host = Pinned({1 << 18});
  const at::Tensor expected = host.clone();
  const at::Tensor copy = host.to(Emu(), /*non_blocking=*/true);
  host.reset();
  const at::Tensor other = at::zeros({1 << 18}).pin_memory();
  EXPECT_TRUE(at::equal(copy.to(at::kCPU), expected));
}

TEST_F(EmuDeviceTest, ACopyToPinnedMemoryIsThereAfterSynchronization) {
  const at::Tensor tensor = at::ones({1000}, OnEmu()) * 3;
  const at::Tensor host = at::zeros({1000}).pin_memory();
  host.copy_(tensor, /*non_blocking=*/true);
  CurrentStream().synchronize();
  EXPECT_EQ(host.sum().item<float>(), 3000);
}

TEST_F(EmuDeviceTest, CopiesConvertTypesAndLayouts) {
  const at::Tensor host = at::randn({6, 5});
  const at::Tensor expected = host.t().to(at::kDouble);
  at::Tensor copy = at::empty({5, 6}, OnEmu(1).dtype(at::kDouble));
  copy.copy_(host.t());
  EXPECT_TRUE(at::equal(copy.to(at::kCPU), expected));
  at::Tensor back = at::empty({6, 5}, at::kDouble).t();
  back.copy_(copy.to(Emu(0)));
  EXPECT_TRUE(at::equal(back, expected));
  at::Tensor broadcast = at::empty({3, 5}, OnEmu());
  broadcast.copy_(at::ones({5}));
  EXPECT_EQ(broadcast.sum().item<float>(), 15);
  EXPECT_THAT(machine_->races(), IsEmpty());
}

// Elements in the same order on both sides are copied as they are. Otherwise they are packed before
// the copy and unpacked after it.
TEST_F(EmuDeviceTest, CopiesHaveTheirLayoutsWhateverTheyAre) {
  const struct {
    const char* name;
    std::function<at::Tensor(const at::Tensor&)> view;  // of 4 x 6: 2 x 3
  } layouts[] = {
      {"packed",
       [](const at::Tensor& base) {
         return base.view({24}).narrow(0, 3, 6).view({2, 3});
       }},
      {"transposed",
       [](const at::Tensor& base) {
         return base.view({24}).narrow(0, 1, 6).view({3, 2}).t();
       }},
      {"every second column",
       [](const at::Tensor& base) {
         return base.as_strided({2, 3}, {6, 2});
       }},
  };
  const c10::Device cpu(at::kCPU);
  for (const auto& [from, to] :
       {std::pair(cpu, Emu()), std::pair(Emu(), cpu), std::pair(Emu(), Emu(1))}) {
    for (const auto& source : layouts) {
      for (const auto& target : layouts) {
        for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
          const at::Tensor values = at::arange(24, at::kFloat).view({4, 6});
          const at::Tensor expected = at::zeros({4, 6}, type);
          const at::Tensor copied = at::zeros({4, 6}, type).to(to);
          target.view(expected).copy_(source.view(values));
          const at::Tensor given = source.view(values.to(from)), taken = target.view(copied);
          ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
          machine_->ResetTimeStats(0);
          machine_->ResetTimeStats(1);
          taken.copy_(given);
          ASSERT_TRUE(machine_->SynchronizeDevice(0).ok());
          ASSERT_TRUE(machine_->SynchronizeDevice(1).ok());
          const uint64_t kernels =
              machine_->time_stats(0).kernels + machine_->time_stats(1).kernels;
          EXPECT_TRUE(at::equal(copied.to(at::kCPU), expected))
              << source.name << " on " << from << " to " << target.name << " on " << to;
          const bool same_bytes =
              &source == &target && &source != &layouts[2] && type == at::kFloat;
          EXPECT_TRUE(kernels == 0 || !same_bytes) << source.name;
          const bool packed_by_host = from.is_cpu() && &target == &layouts[0];
          EXPECT_TRUE(kernels == 0 || !packed_by_host) << source.name;
        }
      }
    }
  }
  EXPECT_THAT(machine_->races(), IsEmpty());
}

TEST_F(EmuDeviceTest, CopiesOfNothingDoNothing) {
  const uint64_t copies = machine_->calls(DeviceCall::kCopy);
  at::empty({0}, OnEmu()).copy_(at::empty({0}));
  at::empty({0}, OnEmu(1)).copy_(at::empty({0}, OnEmu()));
  EXPECT_EQ(machine_->calls(DeviceCall::kCopy), copies);
  EXPECT_EQ(at::empty({1}, OnEmu()).copy_(at::ones({1})).item<float>(), 1);
}

TEST_F(EmuDeviceTest, CopiesOfAnotherShapeAreRefusedEvenIntoNothing) {
  for (const int64_t elements : {0, 2}) {
    const at::Tensor into = at::empty({elements}, OnEmu());
    EXPECT_THAT(ErrorOf([&] { into.copy_(at::ones({4})); }), HasSubstr("size"));
    EXPECT_THAT(ErrorOf([&] { into.copy_(at::ones({4}, OnEmu())); }), HasSubstr("size"));
  }
}

// A copy resolves lazy views, and must not request resolved tensors itself.
TEST_F(EmuDeviceTest, LazyConjugatesAndNegativesAreResolvedByCopies) {
  const at::Tensor host = at::complex(at::randn({6, 5}), at::randn({6, 5}));
  const at::Tensor conjugate = at::_conj(host.to(Emu()));
  const at::Tensor expected = at::_conj(host).resolve_conj();
  ASSERT_TRUE(conjugate.is_conj());
  EXPECT_TRUE(at::equal(conjugate.cpu(), expected));
  EXPECT_TRUE(at::equal(conjugate.resolve_conj().cpu(), expected));
  EXPECT_TRUE(at::equal(conjugate.to(Emu(1)).cpu(), expected));

  const at::Tensor real = at::randn({6, 5});
  const at::Tensor negative = at::_neg_view(real.to(Emu()));
  ASSERT_TRUE(negative.is_neg());
  EXPECT_TRUE(at::equal(negative.cpu(), -real));
  EXPECT_TRUE(at::equal(negative.resolve_neg().cpu(), -real));
  negative.copy_(real);
  EXPECT_TRUE(at::equal(negative.cpu(), real));
}

TEST_F(EmuDeviceTest, CopiesBetweenDevicesAreOrderedOnBoth) {
  const at::Tensor source = at::ones({1000}, OnEmu(0)) * 2;
  const at::Tensor copy = source.to(Emu(1), /*non_blocking=*/true);
  source.fill_(7);
  EXPECT_EQ((copy + 1).sum().item<float>(), 3000);
  copy.fill_(1);
  copy.copy_(source);
  EXPECT_EQ(copy.sum().item<float>(), 7000);
  EXPECT_THAT(machine_->races(), IsEmpty());
}

}  // namespace
}  // namespace pinion
