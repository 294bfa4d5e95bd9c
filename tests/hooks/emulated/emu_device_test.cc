// The emulated device as LibTorch sees it: memory, streams, events, copies, refusals.

#include "pinion/hooks/emulated/emu_device.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class EmuDeviceTest : public ::testing::Test {
 protected:
  EmuDeviceTest() { Use(Options()); }

  static EmulatedOptions Options() {
    EmulatedOptions options;
    options.device_count = 2;
    options.memory_bytes = uint64_t{64} << 20;
    options.abort_on_race = false;
    return options;
  }

  void Use(const EmulatedOptions& options) {
    machine_ = EmulatedMachine::Create(options).value();
    ASSERT_TRUE(RegisterEmuDevice(machine_).ok());
  }

  static c10::Device Emu(int index = 0) {
    return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
  }
  static at::TensorOptions OnEmu(int index = 0) { return at::TensorOptions().device(Emu(index)); }
  static c10::Stream NewStream() {
    return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getNewStream(Emu());
  }
  static at::Tensor Pinned(at::IntArrayRef sizes) { return at::randn(sizes).pin_memory(); }

  std::shared_ptr<EmulatedMachine> machine_;
};

template <typename Function>
std::string ErrorOf(const Function& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// --- The device ---

TEST_F(EmuDeviceTest, TrainsALinearLayer) {
  const auto run = [](c10::Device device) {
    at::manual_seed(1);
    const at::Tensor input = at::randn({8, 16}).to(device);
    const at::Tensor targets = at::randint(4, {8}, at::kLong).to(device);
    at::Tensor weight = at::randn({4, 16}).to(device).requires_grad_(true);
    at::Tensor bias = at::zeros({4}).to(device).requires_grad_(true);
    at::cross_entropy_loss(at::gelu(at::layer_norm(at::linear(input, weight, bias), {4})), targets)
        .backward();
    return std::pair(weight.grad().to(at::kCPU), bias.grad().to(at::kCPU));
  };
  const auto expected = run(at::kCPU);
  const auto actual = run(Emu(1));
  EXPECT_TRUE(at::equal(actual.first, expected.first));
  EXPECT_TRUE(at::equal(actual.second, expected.second));
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
  std::optional<at::Tensor> tensor = at::empty({256}, OnEmu());
  const absl::Status refused = RegisterEmuDevice(EmulatedMachine::Create(Options()).value());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1024 bytes"));
  EXPECT_EQ(RegisteredEmuMachine(), machine_);
  tensor.reset();
  EXPECT_TRUE(RegisterEmuDevice(EmulatedMachine::Create(Options()).value()).ok());
}

// A broken device frees nothing, so an engine leaks what its copies used: nobody can drop that.
TEST_F(EmuDeviceTest, ABrokenMachineIsReplacedThoughTensorsLive) {
  std::optional<at::Tensor> tensor = at::ones({256}, OnEmu());
  machine_->BreakDevice(1, "an error that stays");
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
at::Tensor OnlyMeta(const at::Tensor& self) { return at::empty_like(self); }

torch::Library& TestOperators() {
  static torch::Library* const library = [] {
    auto* const made =
        new torch::Library(torch::Library::DEF, "emu_test", std::nullopt, __FILE__, __LINE__);
    made->def("tail(Tensor(a) self) -> Tensor(a)");
    made->impl("tail", c10::DispatchKey::CPU, &TailOnCpu);
    made->def("nowhere(Tensor self) -> Tensor");
    made->impl("nowhere", c10::DispatchKey::Meta, &OnlyMeta);
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

// A view that falls back to the CPU comes back as a copy: writes to it would be lost silently.
TEST_F(EmuDeviceTest, RefusesAViewWithoutAKernelByName) {
  const at::Tensor tensor = at::ones({4}, OnEmu());
  EXPECT_THAT(ErrorOf([&] { CallByName("emu_test::tail", tensor); }),
              AllOf(HasSubstr("emu_test::tail"), HasSubstr("aliasing")));
}

TEST_F(EmuDeviceTest, RefusesAnOperatorThatTheCpuDoesNotHaveByName) {
  const at::Tensor tensor = at::ones({4}, OnEmu());
  EXPECT_THAT(ErrorOf([&] { CallByName("emu_test::nowhere", tensor); }),
              HasSubstr("emu_test::nowhere"));
}

TEST_F(EmuDeviceTest, RefusesToMixDevices) {
  const at::Tensor here = at::ones({4, 4}, OnEmu(0)), there = at::ones({4, 4}, OnEmu(1));
  EXPECT_THAT(ErrorOf([&] { at::mm(here, there); }), Not(IsEmpty()));
  EXPECT_THAT(ErrorOf([&] { at::index_select(here, 0, there.select(0, 0).to(at::kLong)); }),
              Not(IsEmpty()));
}

TEST_F(EmuDeviceTest, RefusesCpuTensorsBesideTheDevices) {
  const at::Tensor here = at::ones({4, 4}, OnEmu(0));
  EXPECT_THAT(ErrorOf([&] { at::mm(here, at::ones({4, 4})); }), Not(IsEmpty()));
  EXPECT_EQ((here + at::ones({})).sum().item<float>(), 32);  // a scalar may be on the CPU
}

TEST_F(EmuDeviceTest, ViewsShareMemory) {
  const at::Tensor base = at::zeros({4, 6}, OnEmu());
  base.unfold(1, 2, 2).select(2, 0).fill_(1);
  base.t().narrow(0, 1, 1).add_(2);
  base.as_strided({2}, {12}, 5).fill_(3);
  EXPECT_EQ(base.sum().item<float>(), 4 * 3 + 4 * 2 + 2 * 3);
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

// Solvers transpose their result and set its conjugate bit, in place.
TEST_F(EmuDeviceTest, ResultsMayBeConjugatedLazily) {
  const at::Tensor matrix = at::randn({3, 3}, at::kComplexDouble);
  const at::Tensor right = at::randn({3, 3}, at::kComplexDouble);
  const auto solve = [&](c10::Device device) {
    const auto [lu, pivots, info] = at::linalg_lu_factor_ex(matrix.to(device));
    return at::linalg_lu_solve(lu, pivots, right.to(device), /*left=*/false);
  };
  EXPECT_TRUE(at::equal(solve(Emu()).to(at::kCPU), solve(at::kCPU)));
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

// Models ask "is it the CPU?" and take CUDA's way otherwise, with types that the CPU has no kernel
// for.
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
}

TEST_F(EmuDeviceTest, DropoutOfEverythingHasNoGradient) {
  const at::Tensor mask = at::ones({4}, OnEmu().dtype(at::kBool));
  const at::Tensor grad = at::native_dropout_backward(at::ones({4}, OnEmu()), mask, /*scale=*/0);
  EXPECT_EQ(grad.abs().sum().item<float>(), 0);
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
  EXPECT_EQ(machine_->time_stats(0).compute_busy_ms, 0);  // nothing was left to do
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
  EXPECT_EQ(at::mm(a, a).select(0, 0).select(0, 0).item<float>(), 1024);  // and it goes on
}

TEST_F(EmuDeviceTest, ReportsMemoryThroughLibTorch) {
  c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(c10::kPrivateUse1);
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  allocator.resetPeakStats(0);
  const int64_t before = allocator.getDeviceStats(0).allocated_bytes[kAll].current;
  at::empty({1 << 20}, OnEmu());
  const auto stats = allocator.getDeviceStats(0);
  EXPECT_EQ(stats.allocated_bytes[kAll].current, before);
  EXPECT_GE(stats.allocated_bytes[kAll].peak, before + (4 << 20));
  EXPECT_EQ(allocator.getMemoryInfo(0).second, Options().memory_bytes);
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
  c10::Event ready(c10::kPrivateUse1);
  ready.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(Emu()));
  ready.block(side);
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
  EXPECT_THAT(machine_->races(), Not(IsEmpty()));
}

TEST_F(EmuDeviceTest, RecordStreamKeepsMemoryForTheOtherStream) {
  for (const bool record : {true, false}) {
    Use(Options());
    const c10::Stream side = NewStream();
    at::Tensor used = at::ones({1024}, OnEmu());
    side.synchronize();
    c10::Event ready(c10::kPrivateUse1);
    ready.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(Emu()));
    ready.block(side);
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
  c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(Emu()).synchronize();
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

// Lazy views are resolved by a copy, which must not ask for resolved tensors in its turn.
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
  EXPECT_THAT(machine_->races(), IsEmpty());
}

}  // namespace
}  // namespace pinion
