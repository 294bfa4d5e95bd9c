#include "pinion/hooks/activations/cast_sources.h"

#include <optional>
#include <vector>

namespace pinion {

void CastNotes::Add(const at::Tensor& parameter) {
  notes_.try_emplace(parameter.unsafeGetTensorImpl(), WeakTensorImpl(parameter.getIntrusivePtr()),
                     ParameterState(parameter));
}

bool CastNotes::Contains(const at::Tensor& parameter) const {
  return notes_.contains(parameter.unsafeGetTensorImpl());
}

bool CastNotes::IsUnchanged(const at::Tensor& parameter) const {
  const auto found = notes_.find(parameter.unsafeGetTensorImpl());
  return found != notes_.end() && found->second.second.IsOf(parameter);
}

CastNotes CastSources::Note() {
  CastNotes notes;
  std::vector<at::Tensor> parameters;  // destroyed after the lock
  {
    MutexLock lock(mu_);
    parameters.reserve(known_.size());
    absl::erase_if(known_, [&](const auto& known) {
      auto impl = known.second.lock();
      if (!impl) return true;
      parameters.emplace_back(std::move(impl));
      return false;
    });
  }
  for (const at::Tensor& parameter : parameters) notes.Add(parameter);
  return notes;
}

std::unique_ptr<const ParameterCast> CastSources::Find(const at::Tensor& tensor,
                                                       const CastNotes& notes,
                                                       const NodeId& begin) {
  std::unique_ptr<const ParameterCast> cast = ParameterCast::Of(tensor);
  if (cast == nullptr) return nullptr;
  const at::Tensor& parameter = cast->parameter();
  if (!notes.Contains(parameter)) {
    MutexLock lock(mu_);
    known_.try_emplace(parameter.unsafeGetTensorImpl(), parameter.getIntrusivePtr());
    return nullptr;
  }
  const std::optional<NodeId>& node = cast->node();
  const bool is_of_scope =
      node.has_value() && node->thread == begin.thread && node->sequence > begin.sequence;
  return is_of_scope && notes.IsUnchanged(parameter) ? std::move(cast) : nullptr;
}

}  // namespace pinion
