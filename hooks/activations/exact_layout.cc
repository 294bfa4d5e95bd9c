#include "pinion/hooks/activations/exact_layout.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "pinion/hooks/autograd/gather.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

// Marks a tensor over a part of a storage that stands for a tensor over the whole storage. LibTorch
// uses this key in one of its tests; other operators skip it at no cost.
//
// The tensor's storage_offset() counts from the part's first byte. An offset into the whole storage
// would select other bytes. So as_strided() of the tensor or its views throws if it is given an
// offset that differs from the tensor's own.
constexpr c10::DispatchKey kStoragePart = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Kernels of views compute offsets from the tensor's own, so their calls are not checked.
bool IsCalledByKernel() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

void CheckOffset(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor& tensor = torch::jit::peek(*stack, 0, count).toTensor();
  const c10::IValue& offset = torch::jit::peek(*stack, count - 1, count);
  if (!offset.isNone() && !IsCalledByKernel()) {
    TORCH_CHECK(offset.toInt() == tensor.storage_offset(), op.schema().name(),
                "(storage_offset=", offset.toInt(),
                ") of a saved tensor that is a view of less than half of its storage: Pinion has "
                "saved the view alone, so that offsets in the storage have another meaning. Save "
                "view.clone(), save the view within a NoOffloadScope, or pass no storage_offset");
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kStoragePart),
                     stack);
}

torch::Library* NewLibrary(const char* name_space) {
  return new torch::Library(torch::Library::IMPL, name_space, kStoragePart, __FILE__, __LINE__);
}

// Returns the dispatch keys to add to those of a tensor over a part. The first call registers the
// checks of offsets.
c10::DispatchKeySet StoragePartKeys() {
  static const bool registered = [] {
    NewLibrary("_")->fallback(torch::CppFunction::makeFallthrough());
    torch::Library* const aten = NewLibrary("aten");
    for (const char* op : {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"}) {
      aten->impl(op, torch::CppFunction::makeFromBoxedFunction<&CheckOffset>());
    }
    return true;
  }();
  static_cast<void>(registered);
  return c10::DispatchKeySet(kStoragePart);
}

}  // namespace

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
