// Tensors whose bytes visit their device: they have a shape, a device and a storage there as any
// other, but memory only while an operator uses them.
//
//   at::Tensor weight = MakeVisitingTensor(like, storage);   // its operators ask the keeper first
//
// Each carries one more dispatch key, and so does each view of it, whoever made it (autograd's
// saved ones too). An operator that gets one is stopped before autocast, autograd and its kernel:
// the keeper brings the bytes, or throws before anything was launched, and is told when the
// operator has returned. Views are made without bytes. The keeper decides about operators that
// write. Operators that get none of them cost nothing.
//
// The key is DispatchKey::DeferredInit, which LibTorch reserves for libraries beside it and which
// torchdistx alone has used: a process cannot have both (docs/maintainers/decisions/0033).
//
// What reads memory without an operator, as a kernel of one's own in an autograd::Function, is not
// seen: while the weight is away it gets LibTorch's error if it asks by type (data_ptr<float>()),
// and null by data_ptr(); while it is there, nothing keeps it there. Such code works on a clone().
//
// Thread safety: thread-safe, as far as the keeper is.

#ifndef PINION_HOOKS_WEIGHTS_VISITING_TENSOR_H_
#define PINION_HOOKS_WEIGHTS_VISITING_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace c10 {
struct FunctionSchema;
}

namespace pinion {

// An operator that is about to change a tensor, with its arguments.
struct WritingOperator {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> arguments;
  const at::Tensor& written;
};

inline constexpr c10::DispatchKey kVisitingKey = c10::DispatchKey::DeferredInit;

class VisitKeeper : public std::enable_shared_from_this<VisitKeeper> {
 public:
  // Forgets its storages.
  virtual ~VisitKeeper();
  // The unit's bytes are on the device for the calling thread's current stream until Leave. The
  // operator that uses them gets so many bytes of other tensors. Throws c10::Error; then Leave is
  // not called.
  virtual void Enter(uint32_t unit, uint64_t argument_bytes) = 0;
  virtual void Leave(uint32_t unit) = 0;
  // Before Enter. Throws where nothing may be written. True: the keeper has done what the operator
  // does, which then does not run.
  virtual bool Write(uint32_t unit, const WritingOperator& op) = 0;
  // Before Leave: the operator has written. Throws c10::Error.
  virtual void OnWritten(uint32_t) {}

 private:
  friend void MakeVisiting(c10::Storage& storage, const std::shared_ptr<VisitKeeper>& keeper,
                           uint32_t unit);

  std::vector<const c10::StorageImpl*> storages_;
};

// What a storage has for memory: `data`, which the keeper owns, null while it is away. The storage
// keeps the keeper.
c10::DataPtr VisitingData(void* data, std::shared_ptr<VisitKeeper> keeper, c10::Device device);

// Makes the storage, which has no memory, a part of the keeper's unit: away.
void MakeVisiting(c10::Storage& storage, const std::shared_ptr<VisitKeeper>& keeper, uint32_t unit);

// Of the type and shape of `like`, from that item on of a storage that was made visiting.
at::Tensor MakeVisitingTensor(const at::Tensor& like, int64_t storage_offset, c10::Storage storage);

bool IsVisiting(const at::TensorBase& tensor);

// Of a tensor that visits; null of any other.
const VisitKeeper* KeeperOf(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_VISITING_TENSOR_H_
