// Captures the log, and keeps it out of the test's output.
//
//   const CapturedLog log;
//   ...
//   EXPECT_THAT(log.text(), HasSubstr("leaked"));
//
// Thread safety: any thread may log. Read the text when all logging threads are done.

#ifndef PINION_TESTS_SUPPORT_CAPTURED_LOG_H_
#define PINION_TESTS_SUPPORT_CAPTURED_LOG_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::testing {

class CapturedLog {
 public:
  CapturedLog()
      : previous_(SetLogSink([this](LogSeverity, const std::string& message) {
          const MutexLock lock(mu_);
          text_ += message + "\n";
        })) {}
  ~CapturedLog() { SetLogSink(previous_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  const std::string& text() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return text_; }

 private:
  Mutex mu_;
  std::string text_ ABSL_GUARDED_BY(mu_);
  LogSink previous_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_CAPTURED_LOG_H_
