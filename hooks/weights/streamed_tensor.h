// Streamed tensors: device tensors whose storage is sure to have memory only while an operator uses
// it.
//
//   at::Tensor weight = MakeStreamedTensor(like, /*storage_offset=*/0, storage);
//   x.matmul(weight);   // calls the keeper's Enter before the kernel and Leave after it
//
// A streamed tensor and all its views, including those that autograd saves, carry an additional
// dispatch key. The key stops an operator before autocast, autograd and its kernel. The keeper then
// fetches the bytes, or throws before anything is launched. Operators that make views need no
// bytes. The keeper decides about operators that write. Operators without a streamed argument cost
// nothing.
//
// The key is DispatchKey::DeferredInit, which LibTorch reserves for libraries beside it and which
// torchdistx alone has used: a process cannot have both (docs/maintainers/decisions/0033).
//
// Limit: code that reads memory without an operator is not stopped, such as a custom kernel in an
// autograd::Function. If the tensor is not resident, data_ptr<float>() throws LibTorch's error and
// data_ptr() returns null. If the tensor is resident, nothing keeps it so. Use a clone() there.
//
// Thread safety: as thread-safe as the keeper.

#ifndef PINION_HOOKS_WEIGHTS_STREAMED_TENSOR_H_
#define PINION_HOOKS_WEIGHTS_STREAMED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace c10 {
struct FunctionSchema;
}

namespace pinion {

// An operator that is about to write to the streamed tensor `written`.
struct WritingOperator {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> arguments;
  const at::Tensor& written;
};

inline constexpr c10::DispatchKey kStreamedKey = c10::DispatchKey::DeferredInit;

// Makes the units of streamed tensors resident while operators use them.
class ResidencyKeeper : public std::enable_shared_from_this<ResidencyKeeper> {
 public:
  virtual ~ResidencyKeeper();
  // Makes the unit resident for the calling thread's current stream until Leave. `argument_bytes`
  // is the size of the operator's other tensors. Throws c10::Error; then Leave is not called.
  virtual void Enter(uint32_t unit, uint64_t argument_bytes) = 0;
  virtual void Leave(uint32_t unit) = 0;
  // Called before Enter. Throws if the tensor must not be written. Returns true if the keeper has
  // done the operator's work, which then does not run.
  virtual bool Write(uint32_t unit, const WritingOperator& op) = 0;
  // Called before Leave, after the operator has written. Throws c10::Error.
  virtual void OnWritten(uint32_t) {}
  // Called before the program gives a tensor memory that is not streamed (set_data).
  virtual void OnReplaced(uint32_t, const at::Tensor&) {}

 private:
  friend void MakeStreamed(c10::Storage& storage, const std::shared_ptr<ResidencyKeeper>& keeper,
                           uint32_t unit);

  // Weak references: no other storage has these addresses.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

// Returns a storage's pointer to `data`, which the keeper owns, or to null if the unit is not
// resident. The storage shares ownership of the keeper.
c10::DataPtr StreamedData(void* data, std::shared_ptr<ResidencyKeeper> keeper, c10::Device device);

// Makes a storage without memory a part of the keeper's unit.
void MakeStreamed(c10::Storage& storage, const std::shared_ptr<ResidencyKeeper>& keeper,
                  uint32_t unit);

// Returns a tensor over a storage of MakeStreamed, with the type, sizes and strides of `like`.
at::Tensor MakeStreamedTensor(const at::Tensor& like, int64_t storage_offset, c10::Storage storage);

bool IsStreamed(const at::TensorBase& tensor);

// Returns null unless the tensor is streamed.
const ResidencyKeeper* KeeperOf(const at::Tensor& tensor);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_STREAMED_TENSOR_H_
