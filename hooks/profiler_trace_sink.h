// Pinion's ranges among LibTorch's own: what LibTorch's profilers (and any other observer of
// at::RecordFunction) show beside the operators that ran in them.
//
//   options.engine.trace = std::make_shared<ProfilerTraceSink>();
//
// A range's bytes are its first input, which profilers show when they record inputs. While nobody
// observes, a range costs one look at LibTorch's list of callbacks. Transfers are not repeated
// here: on CUDA the profiler sees every copy itself.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_PROFILER_TRACE_SINK_H_
#define PINION_HOOKS_PROFILER_TRACE_SINK_H_

#include <cstdint>

#include "pinion/device/trace/trace_sink.h"

namespace pinion {

class ProfilerTraceSink final : public TraceSink {
 public:
  void BeginRange(const char* name, uint64_t size_bytes) override;
  void EndRange() override;
  bool WantsTransfers() const override { return false; }
};

}  // namespace pinion

#endif  // PINION_HOOKS_PROFILER_TRACE_SINK_H_
