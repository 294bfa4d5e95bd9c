#include "pinion/bench/null_torch_device.h"

#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/autograd/libtorch_compat.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

constexpr c10::DeviceType kNull = c10::DeviceType::PrivateUse1;
const c10::Device kNullDevice(kNull, 0);

// Far more than the live tensors of a program take; 47 bits of addresses suffice.
constexpr uint64_t kAddressBytes = uint64_t{8} << 40;
constexpr uint64_t kAlignmentBytes = 512;

struct Block {
  void* data;
  uint64_t size_bytes;
};

// Returns the next addresses. After the last come the first, whose tensors are long gone.
Block* NewBlock(uint64_t size_bytes) {
  static char* const addresses = [] {
    void* const mapped =
        mmap(nullptr, kAddressBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    PINION_CHECK(mapped != MAP_FAILED) << "no address space for the null device";
    return static_cast<char*>(mapped);
  }();
  static std::atomic<uint64_t> used_bytes{0};
  const uint64_t aligned_bytes = AlignUp(size_bytes, kAlignmentBytes);
  uint64_t offset = used_bytes.fetch_add(aligned_bytes) % kAddressBytes;
  while (offset + aligned_bytes > kAddressBytes) {
    offset = used_bytes.fetch_add(aligned_bytes) % kAddressBytes;
  }
  return new Block{addresses + offset, size_bytes};
}

// Reports allocated bytes, which a memory target reads.
class NullAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    Block* const block = NewBlock(size_bytes);
    Count(block, static_cast<int64_t>(size_bytes));
    return c10::DataPtr(block->data, block, &Delete, kNullDevice);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* dst, const void* src, size_t size_bytes) const override {}

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[kAll].current = live_bytes_.load(std::memory_order_relaxed);
    const int64_t frees = frees_.load(std::memory_order_relaxed);
    const int64_t allocations = allocations_.load(std::memory_order_relaxed);
    stats.allocation[kAll].allocated = allocations;
    stats.allocation[kAll].freed = frees;
    stats.allocation[kAll].current = allocations - frees;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {}
  void resetPeakStats(c10::DeviceIndex index) override {}

 private:
  static void Delete(void* block);
  // Also reports to observers of peaks; `size_bytes` is negative for frees.
  void Count(Block* block, int64_t size_bytes) {
    (size_bytes < 0 ? frees_ : allocations_).fetch_add(1, std::memory_order_relaxed);
    const int64_t live_bytes =
        live_bytes_.fetch_add(size_bytes, std::memory_order_relaxed) + size_bytes;
    if (!c10::memoryProfilingEnabled()) return;
    c10::reportMemoryUsageToProfiler(block->data, size_bytes, live_bytes, live_bytes, kNullDevice);
  }

  std::atomic<int64_t> live_bytes_{0};
  std::atomic<int64_t> allocations_{0};  // from the start
  std::atomic<int64_t> frees_{0};
};

NullAllocator& TheAllocator() {
  static NullAllocator* const allocator = new NullAllocator;
  return *allocator;
}

void NullAllocator::Delete(void* data) {
  auto* const block = static_cast<Block*>(data);
  TheAllocator().Count(block, -static_cast<int64_t>(block->size_bytes));
  delete block;
}

// One device with one stream, which is always done.
class NullGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kNull; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device device) const override { return kNullDevice; }
  c10::Device getDevice() const override { return kNullDevice; }
  void setDevice(c10::Device device) const override {}
  void uncheckedSetDevice(c10::Device device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return getDefaultStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kNullDevice);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());  // null for the default stream, as CUDA's
  }
  bool queryStream(const c10::Stream& stream) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {}
};

class NullHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return true; }
};

void ForgetArguments(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

}  // namespace

void RegisterNullTorchDevice() {
  c10::register_privateuse1_backend(kNullTorchDevice);
  c10::SetAllocator(kNull, &TheAllocator());
  c10::impl::registerDeviceGuard(kNull, new NullGuard);
  at::RegisterPrivateUse1HooksInterface(new NullHooks);
  // Never destroyed: registrations end with their library.
  auto* const library = new torch::Library(torch::Library::IMPL, "aten",
                                           c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&ForgetArguments>());
}

at::Tensor NewNullTensor(uint64_t size_bytes) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes,
                       TheAllocator().allocate(size_bytes), &TheAllocator(), /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      caffe2::TypeMeta::Make<float>());
  impl->set_sizes_contiguous({static_cast<int64_t>(size_bytes / sizeof(float))});
  return at::Tensor(std::move(impl));
}

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Reads saved tensors as LibTorch's own nodes do.
class SavingNode final : public torch::autograd::TraceableFunction {
 public:
  explicit SavingNode(const at::Tensor& gradient) { add_input_metadata(gradient); }

  void Save(const at::Tensor& tensor) { saved_ = SavedVariable(tensor, /*is_output=*/false); }

  variable_list apply(variable_list&& gradients) override {
    PINION_CHECK(saved_.unpack(getptr()).defined());
    return std::move(gradients);
  }
  void release_variables() override { saved_.reset_data(); }

 private:
  SavedVariable saved_;
};

// The end of the chain, which computes nothing.
class FirstNode final : public Node {
 public:
  explicit FirstNode(const at::Tensor& gradient) { add_input_metadata(gradient); }
  variable_list apply(variable_list&& gradients) override { return {}; }
};

class PackerThatDoesNothing final : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return std::make_unique<Kept>(DetachedAlias(tensor));
  }

 private:
  class Kept final : public SavedTensor {
   public:
    explicit Kept(at::Tensor tensor) : tensor_(std::move(tensor)) {}
    at::Tensor Unpack() override { return tensor_; }

   private:
    const at::Tensor tensor_;
  };
};

}  // namespace

double SavingStep::RunUs(const MakeScope& make_scope) const {
  const at::Tensor gradient = at::ones({1});
  const auto start = std::chrono::steady_clock::now();
  {
    NodePtr last = MakeNode<FirstNode>(gradient);
    {
      const std::shared_ptr<void> scope = make_scope();
      for (int i = 0; i < tensors; ++i) {
        const at::Tensor made = NewNullTensor(tensor_bytes);
        torch::autograd::impl::set_gradient_edge(made, {last, 0});
        auto node = MakeNode<SavingNode>(gradient);
        node->add_next_edge(Edge(std::move(last), 0));
        node->Save(made);
        last = std::move(node);
      }
    }
    torch::autograd::Engine::get_default_engine().execute(
        {Edge(last, 0)}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/true);
  }
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

std::shared_ptr<void> HooksThatDoNothing() {
  return std::make_shared<SavedTensorScope>(std::make_shared<PackerThatDoesNothing>());
}

}  // namespace pinion
