#include "pinion/engine/tier/host_tier.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

// The living tiers, by the identity of their devices' system.
struct Tiers {
  using Key = std::pair<std::string, const void*>;
  const ForkOrigin origin;
  Mutex mu;
  std::map<Key, std::weak_ptr<HostTier>> by_system ABSL_GUARDED_BY(mu);
};

// Returns this process's tiers. A child of fork() gets new ones, because another thread of the
// parent may have held the lock. Never destroyed: a tenant may outlive static objects.
Tiers& AllTiers() {
  static std::atomic<Tiers*> all{new Tiers};
  Tiers* tiers = all.load();
  if (!tiers->origin.InForkedChild()) return *tiers;
  auto of_child = std::make_unique<Tiers>();
  if (all.compare_exchange_strong(tiers, of_child.get())) return *of_child.release();
  return *tiers;  // another thread of the child was faster
}

std::string Text(uint64_t value) { return absl::StrCat(value); }
std::string Text(int value) { return absl::StrCat(value); }
std::string Text(double value) { return absl::StrCat(value); }
std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(const std::string& value) { return absl::StrCat("\"", value, "\""); }
std::string Text(absl::Duration value) { return absl::FormatDuration(value); }
std::string Text(const std::shared_ptr<TraceSink>& value) {
  return value ? absl::StrFormat("the sink %p", value.get()) : "none";
}

}  // namespace

std::string HostTierOptions::DifferenceTo(const HostTierOptions& other) const {
  std::string difference;
  const auto compare = [&difference](const char* name, const auto& mine, const auto& theirs) {
    if (!difference.empty() || mine == theirs) return;
    difference = absl::StrCat(name, " is ", Text(mine), " and not ", Text(theirs));
  };
  const AllocatorOptions& a = allocator;
  const AllocatorOptions& b = other.allocator;
  compare("allocator.warn_percent", a.warn_percent, b.warn_percent);
  compare("allocator.high_percent", a.high_percent, b.high_percent);
  compare("allocator.low_percent", a.low_percent, b.low_percent);
  compare("allocator.max_locked_bytes", a.max_locked_bytes, b.max_locked_bytes);
  compare("allocator.ledger_directory", a.ledger_directory, b.ledger_directory);
  compare("allocator.segment_bytes", a.segment_bytes, b.segment_bytes);
  compare("allocator.max_wait_for_deferred", a.max_wait_for_deferred, b.max_wait_for_deferred);
  compare("allocator.alignment_bytes", a.alignment_bytes, b.alignment_bytes);
  compare("allocator.pageable_fallback", a.pageable_fallback, b.pageable_fallback);
  if (!other.any_engine) {
    compare("engine.max_chunk_bytes", engine.max_chunk_bytes, other.engine.max_chunk_bytes);
    compare("engine.drain_timeout", engine.drain_timeout, other.engine.drain_timeout);
    compare("engine.transient_retries", engine.transient_retries, other.engine.transient_retries);
    compare("engine.trace", engine.trace, other.engine.trace);
    compare("engine.time_transfers", engine.time_transfers, other.engine.time_transfers);
  }
  // Functions cannot be compared, and only the first user's is called.
  if (difference.empty() && b.on_ram_level != nullptr) {
    difference = "allocator.on_ram_level can be given by the first user alone";
  }
  return difference;
}

absl::StatusOr<std::shared_ptr<HostTier>> HostTier::OfProcess(
    const HostTierOptions& options, const DeviceBackend& backend,
    std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool) {
  PINION_RETURN_IF_ERROR(options.engine.Validate());
  PINION_RETURN_IF_ERROR(backend.Validate());
  const PinnedAllocator* const own_pool = pool.get();
  if (own_pool != nullptr) {
    source = nullptr;
  } else {
    // Always created: invalid options are refused for later users too.
    PINION_ASSIGN_OR_RETURN(pool, PinnedAllocator::Create(options.allocator, source));
  }
  auto tier = std::make_shared<HostTier>(options, backend, std::move(source), std::move(pool));
  std::shared_ptr<HostTier> living;
  Tiers& tiers = AllTiers();
  {
    MutexLock lock(tiers.mu);
    std::weak_ptr<HostTier>& known = tiers.by_system[{backend.type_name, backend.system}];
    living = known.lock();
    if (living == nullptr) {
      known = tier;
      return tier;
    }
  }
  const std::string difference = living->Join(options, own_pool);
  if (difference.empty()) return living;
  return absl::FailedPreconditionError(absl::StrCat(
      "this process has a host tier for ", backend.type_name,
      " already, which all users share, and it was made with other options: ", difference,
      ". Give the same options, or destroy its users first"));
}

HostTier::HostTier(const HostTierOptions& options, DeviceBackend backend,
                   std::shared_ptr<HostMemorySource> source, std::shared_ptr<PinnedAllocator> pool)
    : backend_(std::move(backend)),
      source_(std::move(source)),
      pool_(std::move(pool)),
      options_(options) {
  PINION_CHECK(pool_ != nullptr) << "a HostTier needs a pool: HostTier::OfProcess makes one";
}

std::string HostTier::Join(const HostTierOptions& options, const PinnedAllocator* pool) {
  if (pool != nullptr && pool != pool_.get()) return "the pool of pinned memory is another one";
  HostTierOptions wanted = options;
  MutexLock lock(mu_);
  if (source_ == nullptr) {
    wanted.allocator = options_.allocator;
    wanted.allocator.on_ram_level = nullptr;
  }
  HostTierOptions joined = options_;
  if (options_.any_engine && !wanted.any_engine) {
    joined.engine = wanted.engine;
    joined.any_engine = false;
  }
  const std::string difference = joined.DifferenceTo(wanted);
  if (difference.empty()) options_ = joined;
  return difference;
}

absl::StatusOr<std::shared_ptr<DeviceTier>> HostTier::ForDevice(int index) {
  for (;;) {
    HostTierOptions options;
    {
      MutexLock lock(mu_);
      if (const auto found = devices_.find(index); found != devices_.end()) return found->second;
      options = options_;
    }
    // Outside the lock, because this calls the device. If two threads get here, the first one to
    // finish wins, and the other engine goes unused.
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<Device> device, backend_.Open(index));
    PINION_ASSIGN_OR_RETURN(std::shared_ptr<TransferEngine> engine,
                            TransferEngine::Create(options.engine, std::move(device)));
    auto tier = std::make_shared<DeviceTier>(std::move(engine), pool_);
    MutexLock lock(mu_);
    if (options.any_engine && !options_.any_engine) continue;  // another user has chosen meanwhile
    options_.any_engine = false;
    return devices_.try_emplace(index, std::move(tier)).first->second;
  }
}

}  // namespace pinion
