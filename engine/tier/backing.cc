#include "pinion/engine/tier/backing.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/slab.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_block.h"

namespace pinion {
namespace {

class PinnedPlace final : public ParcelPlace, public std::enable_shared_from_this<PinnedPlace> {
 public:
  explicit PinnedPlace(PinnedBlock block) : buffer_(std::move(block)) {}

  // The buffer is part of the place and keeps it alive, so both are one allocation.
  std::shared_ptr<HostBuffer> ToWrite() override { return {shared_from_this(), &buffer_}; }
  void Written(const Transfer& /*copy_out*/) override {}  // the copy's ticket is on the buffer
  absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() override { return ToWrite(); }

 private:
  HostBuffer buffer_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<ParcelPlace>> PinnedBacking::Reserve(
    const std::shared_ptr<PinnedAllocator>& pool, uint64_t size_bytes) {
  if (pool == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("PinnedBacking::Reserve of ", size_bytes,
                     " bytes: the pool is null; pass HostTier::pool()"));
  }
  PINION_ASSIGN_OR_RETURN(PinnedBlock block, pool->Allocate(size_bytes));
  return std::allocate_shared<PinnedPlace>(SlabAllocator<PinnedPlace>(), std::move(block));
}

}  // namespace pinion
