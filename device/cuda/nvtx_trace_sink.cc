#include "pinion/device/cuda/nvtx_trace_sink.h"

#include <nvtx3/nvToolsExt.h>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

// Never destroyed: ranges may end while the process exits.
nvtxDomainHandle_t Domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("pinion");
  return domain;
}

}  // namespace

void NvtxTraceSink::BeginRange(const char* name, uint64_t size_bytes) {
  PINION_CHECK(name != nullptr) << "a range has a name";
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  if (size_bytes > 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = size_bytes;
  }
  nvtxDomainRangePushEx(Domain(), &attributes);
}

void NvtxTraceSink::EndRange() { nvtxDomainRangePop(Domain()); }

}  // namespace pinion
