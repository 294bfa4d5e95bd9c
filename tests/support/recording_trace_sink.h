// A TraceSink that records its calls.
//
// Thread safety: thread-safe. Read the records when all tracing threads are done.

#ifndef PINION_TESTS_SUPPORT_RECORDING_TRACE_SINK_H_
#define PINION_TESTS_SUPPORT_RECORDING_TRACE_SINK_H_

#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion::testing {

class RecordingTraceSink : public TraceSink {
 public:
  struct Range {
    std::string name;
    uint64_t size_bytes = 0;
  };

  explicit RecordingTraceSink(bool wants_transfers = true) : wants_transfers_(wants_transfers) {}

  void BeginRange(const char* name, uint64_t size_bytes) override {
    MutexLock lock(mu_);
    ranges_.push_back({name, size_bytes});
    ++depths_[std::this_thread::get_id()];
  }
  void EndRange() override {
    MutexLock lock(mu_);
    EXPECT_GT(depths_[std::this_thread::get_id()]--, 0) << "a range was left that nobody entered";
  }
  bool WantsTransfers() const override { return wants_transfers_; }
  void OnTransfer(const TransferRecord& transfer) override {
    MutexLock lock(mu_);
    transfers_.push_back(transfer);
  }
  void OnStall(const StallRecord& stall) override {
    MutexLock lock(mu_);
    stalls_.push_back(stall);
  }

  std::vector<TransferRecord> transfers() const {
    MutexLock lock(mu_);
    return transfers_;
  }
  std::vector<StallRecord> stalls() const {
    MutexLock lock(mu_);
    return stalls_;
  }
  // In the order of their beginnings.
  std::vector<Range> ranges() const {
    MutexLock lock(mu_);
    return ranges_;
  }
  std::vector<Range> RangesNamed(const std::string& name) const {
    std::vector<Range> named;
    for (const Range& range : ranges()) {
      if (range.name == name) named.push_back(range);
    }
    return named;
  }
  int open_ranges() const {
    MutexLock lock(mu_);
    int open = 0;
    for (const auto& [thread, depth] : depths_) open += depth;
    return open;
  }

 private:
  const bool wants_transfers_;
  mutable Mutex mu_;
  std::vector<Range> ranges_ ABSL_GUARDED_BY(mu_);
  std::map<std::thread::id, int> depths_ ABSL_GUARDED_BY(mu_);
  std::vector<TransferRecord> transfers_ ABSL_GUARDED_BY(mu_);
  std::vector<StallRecord> stalls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_RECORDING_TRACE_SINK_H_
