// Always-on checks for the caller's bugs, and the library's one way to log.
//
//   PINION_CHECK(!block.empty()) << "ReleaseAfter on an empty block";
//   PINION_LOG(kWarning) << "host RAM is at " << percent << " %";
//
// What can happen in a correct program is an absl::Status, never a check. Destructors log and
// count. PINION_DCHECK is active in hardened builds (`--//config:hardening` and every sanitizer
// config); it does not look at NDEBUG, which LibTorch's headers require everywhere.

#ifndef PINION_ALLOCATOR_BASE_CHECK_H_
#define PINION_ALLOCATOR_BASE_CHECK_H_

#include <functional>
#include <sstream>
#include <string>

#include "pinion/config/build_config.h"

namespace pinion {

enum class LogSeverity { kWarning, kError };

using LogSink = std::function<void(LogSeverity, const std::string& message)>;

// Replaces the sink (standard error by default, and for null) and returns the previous one.
// Thread-safe.
LogSink SetLogSink(LogSink sink);

namespace internal {

class LogMessage {
 public:
  LogMessage(const char* file, int line, LogSeverity severity);
  ~LogMessage();
  std::ostringstream& stream() { return stream_; }

 private:
  LogSeverity severity_;
  std::ostringstream stream_;
};

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostringstream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Lets a streamed message be the false arm of a conditional expression.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace internal
}  // namespace pinion

#define PINION_LOG(severity) \
  ::pinion::internal::LogMessage(__FILE__, __LINE__, ::pinion::LogSeverity::severity).stream()

#define PINION_CHECK(condition) PINION_INTERNAL_CHECK((condition), #condition)

#define PINION_DCHECK(condition) \
  PINION_INTERNAL_CHECK(!::pinion::config::kHardened || (condition), #condition)

#define PINION_INTERNAL_CHECK(passed, text)  \
  (passed) ? (void)0                         \
           : ::pinion::internal::Voidify() & \
                 ::pinion::internal::CheckFailure(__FILE__, __LINE__, text).stream()

#endif  // PINION_ALLOCATOR_BASE_CHECK_H_
