// Checks for the caller's bugs that are always on, and the library's log.
//
//   PINION_CHECK(!block.empty()) << "ReleaseAfter on an empty block";
//   PINION_LOG(kWarning) << "host RAM is at " << percent << " %";
//
// A correct program fails no check: events that it can meet are reported by absl::Status.
// Destructors log and count.

#ifndef PINION_ALLOCATOR_BASE_CHECK_H_
#define PINION_ALLOCATOR_BASE_CHECK_H_

#include <functional>
#include <sstream>
#include <string>

namespace pinion {

enum class LogSeverity { kWarning, kError };

using LogSink = std::function<void(LogSeverity, const std::string& message)>;

// Replaces the log's sink and returns the previous one. Null restores the default, standard error.
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

// Lets a streamed message be one arm of a conditional expression.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace internal
}  // namespace pinion

#define PINION_LOG(severity) \
  ::pinion::internal::LogMessage(__FILE__, __LINE__, ::pinion::LogSeverity::severity).stream()

#define PINION_CHECK(condition)                 \
  (condition) ? (void)0                         \
              : ::pinion::internal::Voidify() & \
                    ::pinion::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

#endif  // PINION_ALLOCATOR_BASE_CHECK_H_
