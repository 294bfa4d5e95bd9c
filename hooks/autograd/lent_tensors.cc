#include "pinion/hooks/autograd/lent_tensors.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

class Loans {
 public:
  void Add(at::Tensor tensor, int64_t backward) {
    bool first = false;
    {
      MutexLock lock(mu_);
      loans_.push_back({std::move(tensor), backward});
      any_ = true;
      first = backwards_.insert(backward).second;
    }
    if (first) AtEndOfBackward([this, backward] { End(backward); });
  }

  void Settle() {
    // Usually there are none. An alias that another thread adds concurrently is released by the
    // next call or at the end of its backward.
    if (!any_) return;
    TakeIf([](const Loan& loan) { return loan.tensor.use_count() == 1; });
  }

 private:
  struct Loan {
    at::Tensor tensor;
    int64_t backward;
  };

  void End(int64_t backward) {
    {
      MutexLock lock(mu_);
      backwards_.erase(backward);
    }
    TakeIf([backward](const Loan& loan) { return loan.backward == backward; });
  }

  template <typename Condition>
  void TakeIf(Condition condition) {
    absl::InlinedVector<Loan, 1> taken;  // destroyed after mu_ is unlocked
    MutexLock lock(mu_);
    const auto first = std::partition(loans_.begin(), loans_.end(),
                                      [&](const Loan& loan) { return !condition(loan); });
    taken.assign(std::move_iterator(first), std::move_iterator(loans_.end()));
    loans_.erase(first, loans_.end());
    any_ = !loans_.empty();
  }

  Mutex mu_;
  std::vector<Loan> loans_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> any_ = false;                                // written under mu_
  absl::flat_hash_set<int64_t> backwards_ ABSL_GUARDED_BY(mu_);  // with an End() to come
};

Loans& TheLoans() {
  // Leaked: static destructors may destroy graphs.
  static Loans* const loans = new Loans;
  return *loans;
}

// Aliases the shallow copy that autograd gives to the node, because that copy can become a
// gradient.
class LentImpl : public PlainTensorImpl {
 public:
  explicit LentImpl(const c10::TensorImpl& impl)
      : PlainTensorImpl(c10::Storage(impl.storage()), impl.key_set(), impl.dtype()) {
    copy_tensor_metadata(&impl, this, impl.version_counter(),
                         /*allow_tensor_metadata_change=*/true);
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override {
    return Lent(TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change));
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override {
    return Lent(TensorImpl::shallow_copy_and_detach(std::move(version_counter),
                                                    allow_tensor_metadata_change));
  }

 private:
  static c10::intrusive_ptr<TensorImpl> Lent(c10::intrusive_ptr<TensorImpl> copy) {
    const int64_t backward = CurrentBackward();
    if (backward != -1) TheLoans().Add(at::Tensor(copy), backward);
    return copy;
  }
};

}  // namespace

bool NodeGetsCopyOf(const at::Tensor& saved) {
  return saved.requires_grad() || saved._fw_grad(/*level=*/0).defined();
}

at::Tensor Lend(const at::Tensor& tensor, bool node_gets_copy) {
  SettleLoans();
  const int64_t backward = CurrentBackward();
  if (backward == -1) return tensor;
  const bool lends_copies = (node_gets_copy || NodeGetsCopyOf(tensor)) && IsPlainTensor(tensor);
  at::Tensor lent = lends_copies
                        ? at::Tensor(c10::make_intrusive<LentImpl>(*tensor.unsafeGetTensorImpl()))
                        : tensor;
  TheLoans().Add(lent, backward);
  return lent;
}

void SettleLoans() { TheLoans().Settle(); }

}  // namespace pinion
