#include "pinion/hooks/activations/exact_layout.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/gather.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/storage_part.h"

namespace pinion {

void LayOutForUserCode(const StorageRecord& record, const BoundStream& stream,
                       TensorReturns& returns, BytesOnDevice& bytes) {
  const bool is_shared = bytes.storage.nbytes() != record.size_bytes();
  const bool is_part = record.size_bytes() != record.storage_bytes;
  if (!is_shared && !is_part) return;
  if (bytes.storage.unsafeGetStorageImpl() == record.storage() || !IsReadByUserCode()) return;
  if (is_part) bytes.keys = StoragePartKeys();
  if (!is_shared) return;
  const auto* const block = static_cast<const char*>(bytes.storage.data());
  const std::vector<GatherPiece> piece = {
      {block + record.extent.begin_bytes + bytes.shift_bytes, record.size_bytes()}};
  c10::Storage own;
  try {
    own = GatherOnDevice(stream, piece, record.size_bytes());
  } catch (const c10::OutOfMemoryError&) {
    returns.FreeUnneeded();
    own = GatherOnDevice(stream, piece, record.size_bytes());
  }
  bytes.storage = std::move(own);
  bytes.shift_bytes = -static_cast<int64_t>(record.extent.begin_bytes);
  bytes.is_copy = true;
}

}  // namespace pinion
