#include "pinion/bench/host_latency.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_calls.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"

namespace pinion {

// A volatile read reaches the host every time; the GPU's caches may serve a plain read.
const char kHostLatencyPtx[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry chase(.param .u64 first, .param .u64 reads, .param .u64 last)
{
  .reg .pred %more;
  .reg .u64 %node, %left, %end;
  ld.param.u64 %node, [first];
  ld.param.u64 %left, [reads];
  ld.param.u64 %end, [last];
next:
  ld.volatile.u64 %node, [%node];
  sub.u64 %left, %left, 1;
  setp.ne.u64 %more, %left, 0;
  @%more bra next;
  st.u64 [%end], %node;
  ret;
}
)";

namespace {

constexpr uint64_t kBufferBytes = 2 * kMiB;
constexpr uint64_t kNodeBytes = 128;  // the GPU's cache line
constexpr uint64_t kNodes = kBufferBytes / kNodeBytes;

// A node is the address of the next. The rest of its line is not read.
struct alignas(kNodeBytes) Node {
  Node* next;
};

// Links all nodes in one circle in an order that no prefetcher guesses. Returns the node `reads`
// steps after `nodes`.
const Node* Link(Node* nodes, uint64_t reads) {
  std::vector<uint64_t> order(kNodes);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin() + 1, order.end(), std::mt19937_64(1));
  for (uint64_t i = 0; i < kNodes; ++i) nodes[order[i]].next = &nodes[order[(i + 1) % kNodes]];
  return &nodes[order[reads % kNodes]];
}

}  // namespace

absl::StatusOr<double> MeasureHostLatencyNs(const CudaApi& api, int index, uint64_t reads) {
  if (reads == 0) return absl::InvalidArgumentError("reads is 0");
  CudaDevice device(api, index);
  CudaDeviceScope scope(api, index);
  PINION_RETURN_IF_ERROR(scope.status());

  cudaLibrary_t library = nullptr;
  PINION_RETURN_IF_ERROR(
      CudaStatus(api,
                 api.LibraryLoadData(&library, kHostLatencyPtx, /*jitOptions=*/nullptr,
                                     /*jitOptionsValues=*/nullptr, /*numJitOptions=*/0,
                                     /*libraryOptions=*/nullptr, /*libraryOptionValues=*/nullptr,
                                     /*numLibraryOptions=*/0),
                 absl::StrCat("loading the kernel that measures latency on ", device.name())));
  const absl::Cleanup unload = [&] { api.LibraryUnload(library); };
  cudaKernel_t chase = nullptr;
  PINION_RETURN_IF_ERROR(
      CudaStatus(api, api.LibraryGetKernel(&chase, library, "chase"), "cudaLibraryGetKernel"));

  const std::shared_ptr<HostMemorySource> source = device.pinned_source();
  PINION_ASSIGN_OR_RETURN(
      const HostSegment segment,
      source->Allocate(AlignUp(kBufferBytes + sizeof(Node), source->granularity_bytes())));
  const absl::Cleanup free = [&] { source->Free(segment).IgnoreError(); };
  Node* first = static_cast<Node*>(segment.data);
  Node** last = &first[kNodes].next;
  const Node* const expected = Link(first, reads);

  PINION_ASSIGN_OR_RETURN(const StreamHandle stream, device.CreateStream("latency"));
  const absl::Cleanup destroy_stream = [&] { device.DestroyStream(stream).IgnoreError(); };
  PINION_ASSIGN_OR_RETURN(const EventHandle start, device.CreateTimedEvent());
  const absl::Cleanup destroy_start = [&] { device.DestroyEvent(start).IgnoreError(); };
  PINION_ASSIGN_OR_RETURN(const EventHandle end, device.CreateTimedEvent());
  const absl::Cleanup destroy_end = [&] { device.DestroyEvent(end).IgnoreError(); };

  const auto run = [&](uint64_t count) -> absl::Status {
    void* arguments[] = {&first, &count, &last};
    return CudaStatus(
        api,
        api.LaunchKernel(reinterpret_cast<const void*>(chase), dim3(1), dim3(1), arguments,
                         /*sharedMem=*/0, static_cast<cudaStream_t>(stream.native())),
        "cudaLaunchKernel");
  };
  PINION_RETURN_IF_ERROR(run(kNodes));  // compiles the kernel and touches every page
  PINION_RETURN_IF_ERROR(device.RecordEvent(start, stream));
  PINION_RETURN_IF_ERROR(run(reads));
  PINION_RETURN_IF_ERROR(device.RecordEvent(end, stream));
  PINION_RETURN_IF_ERROR(device.SynchronizeStream(stream));
  if (*last != expected) {
    return absl::InternalError("the chase through host memory ended at a wrong word");
  }
  PINION_ASSIGN_OR_RETURN(const double elapsed_ms, device.ElapsedMs(start, end));
  return elapsed_ms * 1e6 / static_cast<double>(reads);
}

}  // namespace pinion
