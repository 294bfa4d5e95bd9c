#include "pinion/hooks/pin_memory/torch_host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/process_exit.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/pin_memory/pinned_block_registry.h"
#include "pinion/hooks/tier/torch_pinned_source.h"
#include "pinion/hooks/tier/torch_tier.h"

namespace pinion {
namespace {

class TorchHostAllocator final : public at::HostAllocator {
 public:
  // `previous` is the allocator that it replaces, or null.
  TorchHostAllocator(std::shared_ptr<HostTier> tier, c10::DeviceType type,
                     at::HostAllocator* previous)
      : tier_(std::move(tier)),
        source_(std::dynamic_pointer_cast<TorchPinnedSource>(tier_->source())),
        type_(type),
        previous_(previous) {}

  const PinnedAllocator& allocator() const { return tier_->pool(); }
  bool InForkedChild() const { return origin_.InForkedChild(); }
  absl::Status Refusal() const { return origin_.Refusal("Pinion's host allocator"); }

  c10::DataPtr allocate(size_t size_bytes) override;
  bool record_event(void* data, void* context, c10::Stream stream) override;
  void empty_cache() override;
  void copy_data(void* dst, const void* src, size_t size_bytes) const override {
    default_copy_data(dst, src, size_bytes);
  }

  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  // CUDAGraph announces captures. All graphs share one pool: their blocks are never reused.
  void begin_allocate_to_pool(c10::MempoolId_t /*pool*/,
                              std::function<bool(c10::Stream)> /*filter*/) override {
    captures_.fetch_add(1, std::memory_order_relaxed);
  }
  void end_allocate_to_pool(c10::MempoolId_t /*pool*/) override {
    captures_.fetch_sub(1, std::memory_order_relaxed);
  }
  void release_pool(c10::MempoolId_t /*pool*/) override {}

 private:
  static void Delete(void* context);
  void Release(PinnedBlockRecord& record);

  // In a forked child and at process exit blocks are leaked.
  bool Abandoned() const { return ProcessIsExiting() || origin_.InForkedChild(); }

  // Call before taking a lock: another thread of the parent may have held it at the fork.
  void ThrowInForkedChild(const char* doing) const {
    if (origin_.InForkedChild()) ThrowIfError(Refusal(), doing);
  }

  absl::StatusOr<StreamUse> UseOf(const c10::Stream& stream);

  const std::shared_ptr<HostTier> tier_;
  const std::shared_ptr<TorchPinnedSource> source_;  // null if the program provides the pool
  const c10::DeviceType type_;
  at::HostAllocator* const previous_;
  const ForkOrigin origin_;
  std::atomic<int> captures_{0};

  PinnedBlockRegistry registry_{this};

  Mutex mu_;
  std::vector<PinnedBlock> never_reused_ ABSL_GUARDED_BY(mu_);
};

c10::DataPtr TorchHostAllocator::allocate(size_t size_bytes) {
  const c10::Device cpu(c10::kCPU);
  if (size_bytes == 0) return c10::DataPtr(nullptr, nullptr, &Delete, cpu);
  absl::StatusOr<PinnedBlock> block = tier_->pool().Allocate(size_bytes);
  if (!block.ok()) ThrowIfError(block.status(), "pinning host memory for LibTorch");
  void* const data = block->data();
  PinnedBlockRecord& record = registry_.Add(*std::move(block));
  c10::DataPtr result(data, &record, &Delete, cpu);  // owns the block if the rest throws
  if (captures_.load(std::memory_order_relaxed) > 0) {
    const c10::impl::VirtualGuardImpl guard(type_);
    const c10::Stream stream = guard.getStream(guard.getDevice());
    const absl::StatusOr<StreamUse> use = UseOf(stream);
    if (!use.ok()) record.Use(stream, use);
  }
  return result;
}

void TorchHostAllocator::Delete(void* context) {
  auto* const record = static_cast<PinnedBlockRecord*>(context);
  auto* const allocator = static_cast<TorchHostAllocator*>(record->registry().holder());
  if (!allocator->Abandoned()) allocator->Release(*record);
}

// Logs errors, since destructors call this.
void TorchHostAllocator::Release(PinnedBlockRecord& record) {
  if (!record.was_used()) {
    registry_.Remove(record);
    return;
  }
  BlockUses uses = record.TakeUses();
  PinnedBlock block = registry_.Remove(record);
  absl::InlinedVector<FenceTicket, 1> tickets;
  for (const StreamUse& use : uses.streams) {
    absl::StatusOr<FenceTicket> ticket = use.device->engine().Mark(use.stream.native);
    uses.never_reusable.Update(ticket.status());
    if (ticket.ok()) tickets.push_back(*std::move(ticket));
  }
  if (uses.never_reusable.ok()) {
    std::move(block).ReleaseAfter(tickets);
    return;
  }
  const uint64_t size_bytes = block.size_bytes();
  bool first = false;
  {
    const MutexLock lock(mu_);
    first = never_reused_.empty();
    never_reused_.push_back(std::move(block));
  }
  if (first) {
    PINION_LOG(kWarning) << "a pinned block of " << size_bytes
                         << " bytes is never used again: " << uses.never_reusable.message()
                         << " (logged for the first block only)";
  }
}

bool TorchHostAllocator::record_event(void* data, void* context, c10::Stream stream) {
  if (origin_.InForkedChild()) return false;
  PinnedBlockRecord* record = registry_.FindByContext(data, context);
  // Not found by context: pageable memory, or a view by from_blob().
  if (record == nullptr && tier_->pool().Owns(data)) record = registry_.FindByAddress(data);
  if (record == nullptr) {
    return previous_ != nullptr && previous_->record_event(data, context, stream);
  }
  record->Use(stream, UseOf(stream));
  return true;
}

absl::StatusOr<StreamUse> TorchHostAllocator::UseOf(const c10::Stream& stream) {
  try {
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<DeviceTier> device,
                            tier_->ForDevice(stream.device_index()));
    StreamUse use = {BoundStream(stream), std::move(device)};
    PINION_ASSIGN_OR_RETURN(const bool capturing,
                            use.device->engine().IsCapturing(use.stream.native));
    if (capturing) return absl::FailedPreconditionError("a graph that was captured uses it");
    return use;
  } catch (const std::exception& error) {
    return absl::UnavailableError(error.what());
  }
}

void TorchHostAllocator::empty_cache() {
  ThrowInForkedChild("giving cached pinned memory back");
  ThrowIfError(tier_->pool().Trim(0).status(), "giving cached pinned memory back");
  if (previous_ != nullptr) previous_->empty_cache();
}

at::HostStats TorchHostAllocator::get_stats() {
  ThrowInForkedChild("reading the statistics of pinned memory");
  at::HostStats stats = source_ == nullptr ? at::HostStats() : source_->GetStats();
  const PinnedBlockRegistry::Stats in_use = registry_.GetStats();
  stats.active_requests = in_use.requests;
  stats.active_bytes = in_use.bytes;
  return stats;
}

void TorchHostAllocator::reset_accumulated_stats() {
  ThrowInForkedChild("resetting the statistics of pinned memory");
  if (source_ != nullptr) source_->ResetAccumulatedStats();
  registry_.ResetAccumulated();
}

void TorchHostAllocator::reset_peak_stats() {
  ThrowInForkedChild("resetting the statistics of pinned memory");
  if (source_ != nullptr) source_->ResetPeakStats();
  registry_.ResetPeaks();
}

// By device type. Never destroyed, since LibTorch keeps the addresses. Atomic rather than locked,
// because a lock could be held at a fork().
std::atomic<TorchHostAllocator*> g_installed[c10::COMPILE_TIME_MAX_DEVICE_TYPES];

std::atomic<TorchHostAllocator*>& InstalledFor(c10::DeviceType type) {
  return g_installed[static_cast<size_t>(type)];
}

absl::StatusOr<TorchHostAllocator*> Installed(const std::string& device_type) {
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType type, DeviceTypeOf(device_type));
  TorchHostAllocator* const allocator = InstalledFor(type);
  if (allocator == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        "Pinion's host allocator is not installed for ", device_type,
        SwitchedOnByEnvironment("PINION_DISABLE")
            ? ": PINION_DISABLE=1 is in the environment; unset it"
            : ": call InstallTorchHostAllocator, in C pinion_install_torch_host_allocator, first"));
  }
  if (allocator->InForkedChild()) return allocator->Refusal();
  return allocator;
}

// Returns LibTorch's statistics under the names of torch.cuda.host_memory_stats().
std::map<std::string, int64_t> StatsByName(const at::HostStats& stats) {
  std::map<std::string, int64_t> result;
  const auto set = [&result](const std::string& name, const c10::CachingAllocator::Stat& stat) {
    result[name + ".current"] = stat.current;
    result[name + ".peak"] = stat.peak;
    result[name + ".allocated"] = stat.allocated;
    result[name + ".freed"] = stat.freed;
  };
  const auto set_times = [&result](const std::string& name,
                                   const c10::CachingAllocator::DurationStat& stat) {
    result[name + ".total"] = stat.total;
    result[name + ".max"] = stat.max;
    result[name + ".min"] = stat.min;
    result[name + ".count"] = stat.count;
    result[name + ".avg"] = stat.count == 0 ? 0 : stat.total / stat.count;
  };
  set("active_requests", stats.active_requests);
  set("active_bytes", stats.active_bytes);
  set("allocations", stats.allocations);
  set("allocated_bytes", stats.allocated_bytes);
  set_times("host_alloc_time", stats.host_alloc_time);
  set_times("host_free_time", stats.host_free_time);
  result["num_host_alloc"] = stats.num_host_alloc;
  result["num_host_free"] = stats.num_host_free;
  return result;
}

}  // namespace

absl::Status InstallTorchHostAllocator(const AllocatorOptions& options,
                                       const DeviceBackend& backend) {
  PINION_RETURN_IF_ERROR(CheckTorchVersion(aoti_torch_abi_version()));
  PINION_ASSIGN_OR_RETURN(const c10::DeviceType type, DeviceTypeOf(backend.type_name));
  PINION_RETURN_IF_ERROR(backend.Validate());
  PINION_RETURN_IF_ERROR(options.Validate());
  if (SwitchedOnByEnvironment("PINION_DISABLE")) {
    PINION_LOG(kWarning) << "LibTorch's own host allocator stays for " << backend.type_name
                         << ": PINION_DISABLE=1 is in the environment";
    return absl::OkStatus();
  }
  const auto installed = [&backend] {
    return absl::AlreadyExistsError(absl::StrCat("Pinion's host allocator is installed for ",
                                                 backend.type_name,
                                                 " already: install it once in a process"));
  };
  if (InstalledFor(type) != nullptr) return installed();
  HostTierOptions tier_options;
  tier_options.allocator = options;
  tier_options.any_engine = true;  // the engine only has to give tickets
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostTier> tier,
                          TorchHostTier(tier_options, backend, type));
  WatchProcess();
  at::HostAllocator* const previous = at::getHostAllocator(type);
  auto torch_allocator = std::make_unique<TorchHostAllocator>(std::move(tier), type, previous);
  TorchHostAllocator* none = nullptr;
  if (!InstalledFor(type).compare_exchange_strong(none, torch_allocator.get())) {
    return installed();
  }
  // Outranks any allocator that a backend registers, also later.
  at::setHostAllocator(type, torch_allocator.release(), /*priority=*/UINT8_MAX);
  return absl::OkStatus();
}

absl::StatusOr<AllocatorStats> TorchHostAllocatorStats(const std::string& device_type) {
  PINION_ASSIGN_OR_RETURN(const TorchHostAllocator* const allocator, Installed(device_type));
  return allocator->allocator().GetStats();
}

absl::StatusOr<std::map<std::string, int64_t>> TorchHostMemoryStats(
    const std::string& device_type) {
  PINION_ASSIGN_OR_RETURN(TorchHostAllocator* const allocator, Installed(device_type));
  return StatsByName(allocator->get_stats());
}

}  // namespace pinion
