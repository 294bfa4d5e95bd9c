#include "pinion/hooks/gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/storage_view.h"

namespace pinion {
namespace {

// In a storage of its own: an operator that asks a lazily cloned storage for its data, even to read
// it, makes it copy itself.
at::Tensor Borrow(const void* data, uint64_t size_bytes, c10::Device device) {
  return ViewOfStorage(
      c10::Storage(c10::Storage::use_byte_size_t(), size_bytes,
                   c10::DataPtr(const_cast<void*>(data), device), /*allocator=*/nullptr,
                   /*resizable=*/false),
      at::kByte, 0, size_bytes);
}

}  // namespace

c10::Storage GatherOnDevice(const BoundStream& stream, const std::vector<GatherPiece>& pieces,
                            uint64_t block_bytes) {
  const AllocationLabel label("small saved tensors gathered by Pinion");
  c10::Storage block = AllocateStorage(stream.torch, block_bytes);
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const GatherPiece& piece : pieces) {
    from.push_back(Borrow(piece.data, piece.size_bytes, stream.torch.device()));
    to.push_back(ViewOfStorage(block, at::kByte, piece.offset_bytes, piece.size_bytes));
  }
  const c10::StreamGuard guard(stream.torch);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::_foreach_copy_(to, from);
  return block;
}

}  // namespace pinion
