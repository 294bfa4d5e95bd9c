#include "pinion/tests/support/heap_source.h"

#include <new>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion::testing {
namespace {

// AddressSanitizer's heap aborts if a request exceeds the address space.
constexpr uint64_t kMostBytes = uint64_t{1} << 40;

}  // namespace

absl::StatusOr<HostSegment> HeapSource::Allocate(uint64_t size_bytes) {
  PINION_RETURN_IF_ERROR(CheckSize(size_bytes));
  void* const data =
      size_bytes > kMostBytes
          ? nullptr
          :
          operator new(size_bytes, std::align_val_t(granularity_bytes()), std::nothrow);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the heap has no ", HumanBytes(size_bytes),
        "; look at the host's free memory and the limit of address space (ulimit -v)"));
  }
  return HostSegment{data, size_bytes, /*numa_node=*/-1};
}

absl::Status HeapSource::Free(const HostSegment& segment) {
  operator delete(segment.data, std::align_val_t(granularity_bytes()));
  return absl::OkStatus();
}

}  // namespace pinion::testing
