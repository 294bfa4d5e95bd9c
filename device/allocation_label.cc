#include "pinion/device/allocation_label.h"

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
  if (outermost_) CurrentLabel().clear();
}

const std::string& AllocationLabel::Current() { return CurrentLabel(); }

}  // namespace pinion
