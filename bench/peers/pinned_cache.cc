#include "pinion/bench/peers/pinned_cache.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class PinnedCache::Impl final : public at::CachingHostAllocatorImpl<c10::Stream, c10::Event> {
 public:
  explicit Impl(c10::Device device) : device_(device) {}
  ~Impl() override {
    // LibTorch's own cache is never destroyed, so nothing else waits for copies that use this
    // memory.
    try {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      empty_cache();
    } catch (const c10::Error& error) {
      PINION_LOG(kError) << "unpinning host memory: " << error.what_without_backtrace();
    }
  }

  int64_t pinned_blocks() const {
    const MutexLock lock(mu_);
    return static_cast<int64_t>(pinned_.size());
  }

 private:
  using HostBlock = at::HostBlock<c10::Stream>;

  void allocate_host_memory(size_t size, void** ptr) override {
    c10::DataPtr memory = at::getHostAllocator(device_.type())->allocate(size);
    *ptr = memory.get();
    const MutexLock lock(mu_);
    pinned_.emplace(*ptr, std::move(memory));
  }
  void free_block(HostBlock* block) override {
    c10::DataPtr memory;  // unpinned after the unlock
    const MutexLock lock(mu_);
    const auto pinned = pinned_.find(block->ptr_);
    memory = std::move(pinned->second);
    pinned_.erase(pinned);
  }
  void record_stream(std::optional<std::vector<c10::Event>>& events, c10::Stream stream) override {
    events->emplace_back(stream.device_type());
    events->back().record(stream);
  }
  bool query_event(c10::Event& event) override { return event.query(); }
  bool pinned_use_background_threads() override { return false; }
  c10::Stream get_current_stream() const override { return CurrentStream(device_); }
  bool stream_is_capturing(c10::Stream) const override { return false; }

  const c10::Device device_;
  mutable Mutex mu_;
  std::unordered_map<void*, c10::DataPtr> pinned_ ABSL_GUARDED_BY(mu_);
};

PinnedCache::PinnedCache(c10::Device device) : impl_(std::make_shared<Impl>(device)) {}

at::Tensor PinnedCache::Empty(at::IntArrayRef sizes, c10::ScalarType type) {
  const auto [data, block] =
      impl_->allocate(c10::multiply_integers(sizes) * c10::elementSize(type));
  return at::from_blob(
      data, sizes, [impl = impl_, block = block](void*) { impl->free(block); },
      at::TensorOptions(type));
}

void PinnedCache::UsedOn(const c10::Stream& stream, const at::Tensor& tensor) {
  // The cache also identifies blocks by address.
  void* const data = tensor.storage().mutable_data();
  impl_->record_event(data, /*ctx=*/data, stream);
}

int64_t PinnedCache::pinned_blocks() const { return impl_->pinned_blocks(); }

}  // namespace pinion
