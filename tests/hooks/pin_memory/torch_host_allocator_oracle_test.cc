// Compares Pinion's host allocator with the one that it replaces: LibTorch's own cache, installed
// before on the same emulated device.

#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"

namespace pinion::testing {
namespace torch_host_allocator_oracle_test {

constexpr c10::DeviceType kEmu = c10::DeviceType::PrivateUse1;

std::shared_ptr<EmulatedMachine>& Machine() {
  static auto* const machine = new std::shared_ptr<EmulatedMachine>;
  return *machine;
}

c10::Stream DefaultStream() { return CurrentStream(c10::Device(kEmu, 0)); }

class LibTorchCacheImpl final : public at::CachingHostAllocatorImpl<c10::Stream, c10::Event> {
 public:
  void copy_data(void*, const void*, size_t) const override {}

 private:
  using Block = at::HostBlock<c10::Stream>;

  void allocate_host_memory(size_t size, void** data) override {
    const std::shared_ptr<HostMemorySource> source = Machine()->device(0)->pinned_source();
    *data = source->Allocate(AlignUp(size, source->granularity_bytes())).value().data;
  }
  void free_block(Block* block) override {
    const std::shared_ptr<HostMemorySource> source = Machine()->device(0)->pinned_source();
    const uint64_t size_bytes = AlignUp(block->size_, source->granularity_bytes());
    PINION_CHECK(source->Free({block->ptr_, size_bytes}).ok());
  }
  void record_stream(std::optional<std::vector<c10::Event>>& events, c10::Stream stream) override {
    events->emplace_back(kEmu);
    events->back().record(stream);
  }
  bool query_event(c10::Event& event) override { return event.query(); }
  c10::Stream get_current_stream() const override { return DefaultStream(); }
  bool stream_is_capturing(c10::Stream) const override { return false; }
};

DECLARE_HOST_ALLOCATOR(LibTorchCache, LibTorchCacheImpl, DeleteOfLibTorchCache, libtorch_cache)

class TorchHostAllocatorOracleTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    EmulatedOptions machine;
    machine.memory_bytes = 64 * kMiB;
    Machine() = EmulatedMachine::Create(machine).value();
    PINION_CHECK(RegisterEmuDevice(Machine()).ok());
    at::setHostAllocator(kEmu, &libtorch_cache);
    AllocatorOptions options;
    options.segment_bytes = 2 * kMiB;
    options.warn_percent = options.high_percent = options.low_percent = 100;
    PINION_CHECK(InstallTorchHostAllocator(options, EmulatedBackend(Machine())).ok());
  }

  static at::HostAllocator& pinion() { return *at::getHostAllocator(kEmu); }
};

at::Tensor TensorOn(const c10::DataPtr& block, int64_t size_bytes) {
  return at::from_blob(block.get(), {size_bytes}, at::kByte);
}

// Copies from blocks that are freed immediately, on two streams that are sometimes delayed. Each
// copy must deliver the bytes that its block had at submission.
void RunTrace(at::HostAllocator& allocator, uint64_t seed) {
  std::mt19937_64 random(seed);
  const c10::Stream streams[] = {DefaultStream(), c10::impl::VirtualGuardImpl(kEmu).getNewStream(
                                                      c10::Device(kEmu, 0), /*priority=*/0)};
  Kernel delay;
  delay.flops = 1e12;
  std::vector<at::Tensor> arrived, sent;
  for (int step = 0; step < 60; ++step) {
    const c10::StreamGuard guard(streams[random() % 2]);
    const int64_t size_bytes = 1 + static_cast<int64_t>(random() % (64 * kKiB));
    c10::DataPtr block = allocator.allocate(size_bytes);
    const at::Tensor host = TensorOn(block, size_bytes);
    host.fill_(step);
    if (random() % 4 == 0) {
      const StreamHandle stream = NativeStream(guard.current_stream());
      ASSERT_TRUE(Machine()->PrepareKernel(0, stream).ok());
      ASSERT_TRUE(Machine()->Launch(0, stream, delay).ok());
    }
    arrived.push_back(at::empty({size_bytes}, at::TensorOptions(at::kByte).device(kEmu)));
    arrived.back().copy_(host, /*non_blocking=*/true);
    sent.push_back(at::full({size_bytes}, step, at::kByte));
    if (random() % 8 == 0) {
      ASSERT_TRUE(Machine()->SynchronizeDevice(0).ok());
    }
  }
  ASSERT_TRUE(Machine()->SynchronizeDevice(0).ok());
  for (size_t i = 0; i < arrived.size(); ++i) {
    EXPECT_TRUE(at::equal(arrived[i].cpu(), sent[i])) << "copy " << i;
  }
}

TEST_F(TorchHostAllocatorOracleTest, BothKeepABlockUntilItsCopyIsDone) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  RunTrace(libtorch_cache, seed);
  RunTrace(pinion(), seed);
  EXPECT_EQ(pinion().get_stats().active_requests.allocated,
            libtorch_cache.get_stats().active_requests.allocated);
  EXPECT_EQ(pinion().get_stats().active_requests.current, 0);
}

TEST_F(TorchHostAllocatorOracleTest, BothFindABlockByItsContextOrItsAddress) {
  int foreign = 0;
  for (at::HostAllocator* allocator :
       {&pinion(), static_cast<at::HostAllocator*>(&libtorch_cache)}) {
    const c10::DataPtr block = allocator->allocate(1000);
    char* const inside = static_cast<char*>(block.get()) + 500;
    EXPECT_TRUE(allocator->record_event(block.get(), block.get_context(), DefaultStream()));
    EXPECT_TRUE(allocator->record_event(block.get(), nullptr, DefaultStream()));
    EXPECT_TRUE(allocator->record_event(block.get(), &foreign, DefaultStream()));
    EXPECT_TRUE(allocator->record_event(inside, block.get_context(), DefaultStream()));
    EXPECT_FALSE(allocator->record_event(&foreign, &foreign, DefaultStream()));
    // A copy from part of a from_blob tensor; LibTorch's own allocator misses it.
    EXPECT_EQ(allocator->record_event(inside, nullptr, DefaultStream()), allocator == &pinion());
  }
}

TEST_F(TorchHostAllocatorOracleTest, BothCountAllocationsAlikeAndForgetThemAlike) {
  for (at::HostAllocator* allocator :
       {&pinion(), static_cast<at::HostAllocator*>(&libtorch_cache)}) {
    allocator->empty_cache();
    allocator->reset_accumulated_stats();
    allocator->reset_peak_stats();
    const int64_t before = allocator->get_stats().allocated_bytes.current;
    { const c10::DataPtr block = allocator->allocate(2 * kMiB); }
    at::HostStats stats = allocator->get_stats();
    EXPECT_EQ(stats.allocations.allocated, 1);
    EXPECT_EQ(stats.num_host_alloc, 1);
    EXPECT_EQ(stats.bucket_allocation[21], 1);
    EXPECT_EQ(stats.active_requests.allocated, 1);
    EXPECT_EQ(stats.active_bytes.allocated, 2 * kMiB);
    EXPECT_EQ(stats.allocated_bytes.peak, before + int64_t{2 * kMiB});
    allocator->empty_cache();
    allocator->reset_peak_stats();
    stats = allocator->get_stats();
    EXPECT_EQ(stats.num_host_free, 1);
    EXPECT_EQ(stats.allocated_bytes.current, before);
    EXPECT_EQ(stats.allocated_bytes.peak, before);
    allocator->reset_accumulated_stats();
    stats = allocator->get_stats();
    EXPECT_EQ(stats.num_host_alloc + stats.num_host_free, 0);
    EXPECT_EQ(stats.active_requests.allocated, 0);
    EXPECT_EQ(stats.bucket_allocation[21], 0);
  }
}

// Blocks pinned before Pinion's installation belong to LibTorch, which must learn of their copies.
TEST_F(TorchHostAllocatorOracleTest, TheAllocatorBeforeStillHearsOfCopies) {
  c10::DataPtr block = libtorch_cache.allocate(kMiB);
  const void* const data = block.get();
  const at::Tensor device = at::empty({kMiB}, at::TensorOptions(at::kByte).device(kEmu));
  device.copy_(TensorOn(block, kMiB), /*non_blocking=*/true);
  block.clear();
  const c10::DataPtr other = libtorch_cache.allocate(kMiB);
  EXPECT_NE(other.get(), data);
  ASSERT_TRUE(Machine()->SynchronizeDevice(0).ok());
}

TEST_F(TorchHostAllocatorOracleTest, EmptyCacheEmptiesThatOfTheAllocatorBeforeToo) {
  { const c10::DataPtr block = libtorch_cache.allocate(kMiB); }
  EXPECT_GT(libtorch_cache.get_stats().allocated_bytes.current, 0);
  pinion().empty_cache();
  EXPECT_EQ(libtorch_cache.get_stats().allocated_bytes.current, 0);
}

}  // namespace torch_host_allocator_oracle_test
}  // namespace pinion::testing
