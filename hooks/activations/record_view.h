// One saved tensor of those that share a record: which view of the bytes it is, and at which
// version it was saved.
//
// Thread safety: immutable.

#ifndef PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_
#define PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "pinion/hooks/activations/saved_view.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/saved_version.h"

namespace pinion {

class RecordView {
 public:
  // `is_first`: the record was made of `tensor`, and knows all of this already.
  RecordView(RecordPtr record, const at::Tensor& tensor, bool is_first)
      : record_(std::move(record)),
        own_(is_first ? nullptr : std::make_unique<const Own>(tensor)) {}

  StorageRecord& record() const { return *record_; }
  const SavedView& view() const { return own_ == nullptr ? record_->origin.view() : own_->view; }

  // As SavedVersion::Check.
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

  RecordPtr record_;
  std::unique_ptr<const Own> own_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_RECORD_VIEW_H_
