#include "pinion/hooks/activations/scope_packer.h"

#include <c10/core/DeviceType.h>

#include <string>
#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion {

namespace {

std::atomic<ScopeId> last_scope_id{0};

}  // namespace

ScopeId NewScopeId() { return ++last_scope_id; }

ScopeId LastScopeId() { return last_scope_id; }

void WarnOfNoTensorOn(c10::DeviceType device_type) {
  const std::string type = c10::DeviceTypeName(device_type, /*lower_case=*/true);
  PINION_LOG(kWarning) << "an OffloadScope of a session for \"" << type
                       << "\" offloads nothing: autograd has saved no strided tensor on " << type
                       << ". Move the model and its inputs there before forward";
}

ScopePacker::ScopePacker(std::shared_ptr<PackTarget> target, ScopeModule module,
                         std::shared_ptr<PackScope> scope)
    : target_(std::move(target)), module_(std::move(module)), scope_(std::move(scope)) {}

// Segments in a backward, or after the scope's end, are not recorded.
std::optional<uint32_t> ScopePacker::KeepSegment(const SegmentBegin& segment) {
  if (CurrentBackward() != -1 || scope_->ended) return std::nullopt;
  return target_->KeepSegment(segment, scope_->id);
}

}  // namespace pinion
