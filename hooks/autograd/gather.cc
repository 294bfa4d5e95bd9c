#include "pinion/hooks/autograd/gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>

#include "pinion/device/allocation_label.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

// The buffer gets a storage of its own: an operator that asks a lazily cloned storage for its data
// makes it copy itself.
at::Tensor Borrow(const void* data, uint64_t size_bytes, c10::ScalarType type, c10::Device device) {
  return ViewOfStorage(
      c10::Storage(c10::Storage::use_byte_size_t(), size_bytes,
                   c10::DataPtr(const_cast<void*>(data), device), /*allocator=*/nullptr,
                   /*resizable=*/false),
      type, 0, size_bytes);
}

// A kernel moves an element at a time, so larger elements are faster. LibTorch's largest has 16
// bytes.
constexpr c10::ScalarType kWide = at::kComplexDouble;
constexpr uint64_t kWideBytes = 16;

bool IsWide(const GatherPiece& piece) {
  return piece.size_bytes % kWideBytes == 0 && piece.offset_bytes % kWideBytes == 0 &&
         reinterpret_cast<uintptr_t>(piece.data) % kWideBytes == 0;
}

}  // namespace

c10::Storage GatherOnDevice(const BoundStream& stream, const std::vector<GatherPiece>& pieces,
                            uint64_t block_bytes) {
  const AllocationLabel label("small saved tensors gathered by Pinion");
  c10::Storage block = AllocateStorage(stream.torch, block_bytes);
  const c10::StreamGuard guard(stream.torch);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const bool wide : {true, false}) {
    const c10::ScalarType type = wide ? kWide : at::kByte;
    std::vector<at::Tensor> from;
    std::vector<at::Tensor> to;
    for (const GatherPiece& piece : pieces) {
      if (IsWide(piece) != wide) continue;
      from.push_back(Borrow(piece.data, piece.size_bytes, type, stream.torch.device()));
      to.push_back(ViewOfStorage(block, type, piece.offset_bytes, piece.size_bytes));
    }
    if (!from.empty()) at::_foreach_copy_(to, from);
  }
  return block;
}

}  // namespace pinion
