#include "pinion/bench/peers/graph_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include "pinion/allocator/base/check.h"
#include "pinion/bench/peers/peer_streams.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

GraphCopy::~GraphCopy() {
  try {
    if (source.defined()) copied_out->block(CurrentStream(source.device()));
    if (fetched.defined() && host.defined()) copied_in->block(CurrentStream(fetched.device()));
  } catch (const c10::Error& error) {
    PINION_LOG(kError) << "giving up a copy: " << error.what_without_backtrace();
  }
}

GraphCopies::GraphCopies(c10::Device device)
    : device_(device), out_(NewStream(device)), in_(NewStream(device)), host_memory_(device) {}

at::Tensor GraphCopies::TakeBuffer(const Kind& kind) {
  std::vector<at::Tensor>& buffers = pool_[kind];
  if (buffers.empty()) return host_memory_.Empty({kind.first}, kind.second);
  const at::Tensor buffer = buffers.back();
  buffers.pop_back();
  return buffer;
}

std::shared_ptr<GraphCopy> GraphCopies::CopyOut(const at::Tensor& tensor) {
  auto copy = std::make_shared<GraphCopy>();
  copy->host = TakeBuffer({tensor.numel(), tensor.scalar_type()});
  WaitFor(out_, CurrentStream(device_));
  {
    const c10::StreamGuard guard(out_);
    copy->host.copy_(tensor.view({-1}), /*non_blocking=*/true);
    host_memory_.UsedOn(out_, copy->host);
  }
  copy->copied_out = RecordEvent(out_);
  copy->source = DetachedAlias(tensor);
  stats_.offloaded_bytes += tensor.nbytes();
  return copy;
}

void GraphCopies::DropSource(GraphCopy& copy) const {
  copy.copied_out->block(CurrentStream(device_));
  copy.source.reset();
}

void GraphCopies::Fetch(GraphCopy& copy) {
  if (copy.fetched.defined()) return;
  // Allocated on the compute stream, so its readers there need no record_stream. That stream
  // already waited for the copy out.
  const at::Tensor fetched = at::empty(copy.host.sizes(), copy.host.options().device(device_));
  WaitFor(in_, CurrentStream(device_));
  {
    const c10::StreamGuard guard(in_);
    fetched.copy_(copy.host, /*non_blocking=*/true);
    host_memory_.UsedOn(in_, copy.host);
  }
  copy.copied_in = RecordEvent(in_);
  copy.fetched = fetched;
  stats_.fetched_bytes += copy.fetched.nbytes();
}

at::Tensor GraphCopies::Use(GraphCopy& copy) {
  Fetch(copy);
  if (copy.host.defined()) {
    copy.copied_in->block(CurrentStream(device_));
    // The buffer's next copy waits for the compute stream's current work.
    pool_[{copy.host.numel(), copy.host.scalar_type()}].push_back(std::move(copy.host));
  }
  return copy.fetched;
}

}  // namespace pinion
