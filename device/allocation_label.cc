#include "pinion/device/allocation_label.h"

#include <utility>

namespace pinion {
namespace {

std::string& CurrentLabel() {
  thread_local std::string label;
  return label;
}

}  // namespace

AllocationLabel::AllocationLabel(std::string label) : outermost_(CurrentLabel().empty()) {
  if (outermost_) CurrentLabel() = std::move(label);
}

AllocationLabel::~AllocationLabel() {
  if (outermost_) CurrentLabel().clear();
}

const std::string& AllocationLabel::Current() { return CurrentLabel(); }

}  // namespace pinion
