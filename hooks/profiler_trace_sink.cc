#include "pinion/hooks/profiler_trace_sink.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

struct Range {
  Range(at::StepCallbacks&& callbacks, const char* name, uint64_t size_bytes)
      : bytes(static_cast<int64_t>(size_bytes)), function(std::move(callbacks)) {
    if (function.needsInputs()) {
      function.before(name, c10::ArrayRef<const c10::IValue>(bytes));
    } else {
      function.before(name);
    }
  }

  const c10::IValue bytes;
  at::RecordFunction function;
};

// The calling thread's ranges, the last one entered at the back; null: nobody observed it.
std::vector<std::unique_ptr<Range>>& Entered() {
  thread_local std::vector<std::unique_ptr<Range>> entered;
  return entered;
}

}  // namespace

void ProfilerTraceSink::BeginRange(const char* name, uint64_t size_bytes) {
  PINION_CHECK(name != nullptr) << "a range has a name";
  std::unique_ptr<Range> range;
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    range = std::make_unique<Range>(*std::move(callbacks), name, size_bytes);
  }
  Entered().push_back(std::move(range));
}

void ProfilerTraceSink::EndRange() {
  PINION_CHECK(!Entered().empty()) << "EndRange without BeginRange on this thread";
  Entered().pop_back();
}

}  // namespace pinion
