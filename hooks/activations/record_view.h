// A saved tensor as a view of its record's bytes, with the version at which it was saved.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_
#define PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "pinion/hooks/activations/saved_origin.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_version.h"

namespace pinion {

class RecordView {
 public:
  // `is_first`: the record was made from `tensor` and has its view and version.
  RecordView(RecordPtr record, const at::Tensor& tensor, bool is_first)
      : record_(std::move(record)), own_(is_first ? nullptr : std::make_unique<const Own>(tensor)) {
    if (!NodeGetsCopyOf(tensor)) tensor_.emplace(tensor.getIntrusivePtr());
  }

  StorageRecord& record() const { return *record_; }
  const SavedView& view() const { return own_ == nullptr ? record_->origin.view() : own_->view; }

  // Returns an alias of the view over `storage`, whose bytes are shifted by `shift_bytes` against
  // the original. If autograd gives the node the very tensor, and the program still has the saved
  // one over that storage, returns that one, with its class, attributes and identity in Python.
  at::Tensor Lend(c10::Storage storage, int64_t shift_bytes, c10::DispatchKeySet keys) const {
    const bool node_gets_copy = !tensor_.has_value();
    at::Tensor tensor = node_gets_copy ? at::Tensor() : at::Tensor(tensor_->lock());
    if (!tensor.defined() || !tensor.storage().is_alias_of(storage)) {
      tensor = view().Over(std::move(storage), shift_bytes, keys, &record_->version.counter());
    }
    return pinion::Lend(tensor, node_gets_copy);
  }

  // See SavedVersion::Check.
  void CheckVersion() const {
    const SavedVersion& version = own_ == nullptr ? record_->version : own_->version;
    version.Check([this] { return view().Describe(); });
  }

 private:
  struct Own {
    explicit Own(const at::Tensor& tensor) : version(tensor), view(tensor) {}
    const SavedVersion version;
    const SavedView view;
  };

  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  RecordPtr record_;
  std::unique_ptr<const Own> own_;
  std::optional<WeakTensor> tensor_;  // nothing if the node gets a copy
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_
