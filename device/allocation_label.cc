#include "pinion/device/allocation_label.h"

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

std::string& CurrentLabel() {
  thread_local std::string label;
  return label;
}

}  // namespace

AllocationLabel::AllocationLabel(std::string_view label) : outermost_(CurrentLabel().empty()) {
  if (outermost_) CurrentLabel() = label;
}

AllocationLabel::~AllocationLabel() {
  if (!outermost_) return;
  if (thread_ == std::this_thread::get_id()) {
    CurrentLabel().clear();
    return;
  }
  PINION_LOG(kError)
      << "an AllocationLabel has ended on another thread than the one that opened it, "
         "whose allocations keep the label: end labels on the thread that opens them";
}

const std::string& AllocationLabel::Current() { return CurrentLabel(); }

}  // namespace pinion
