#include "pinion/hooks/activations/live_tensor.h"

#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

const char* WhereIs(const LiveTensor& tensor) {
  if (tensor.on_device) return tensor.in_host_memory ? "on both sides" : "on the device";
  return tensor.in_host_memory ? "in host memory" : "to be cast again";
}

}  // namespace

std::string ToString(const std::vector<LiveTensor>& tensors) {
  std::string text;
  for (const LiveTensor& tensor : tensors) {
    absl::StrAppendFormat(&text,
                          "%s, %s, %s%s, saved by node %d of scope %d (opened since: %d) on device "
                          "%d, held %d time%s, %s\n",
                          tensor.tensor, HumanBytes(tensor.size_bytes),
                          tensor.made_by.empty() ? "a leaf" : "made by ", tensor.made_by,
                          tensor.node, tensor.scope, tensor.scopes_ago, tensor.device_index,
                          tensor.saved_tensors, tensor.saved_tensors == 1 ? "" : "s",
                          WhereIs(tensor));
  }
  return text;
}

}  // namespace pinion
