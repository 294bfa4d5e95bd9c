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

#include "pinion/allocator/base/check.h"

namespace pinion::testing {

class CapturedLog {
 public:
  CapturedLog()
      : previous_(SetLogSink(
            [this](LogSeverity, const std::string& message) { text_ += message + "\n"; })) {}
  ~CapturedLog() { SetLogSink(previous_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  LogSink previous_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_CAPTURED_LOG_H_
