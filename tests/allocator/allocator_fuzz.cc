// libFuzzer's entry: any bytes are a list of operations (docs/maintainers/testing.md).

#include <cstddef>
#include <cstdint>
#include <string>

#include "pinion/allocator/base/check.h"
#include "pinion/tests/allocator/allocator_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const pinion::testing::OperationList list(data, data + size);
  const std::string failure = pinion::testing::RunOperations({list}).failure;
  PINION_CHECK(failure.empty()) << failure;
  return 0;
}
