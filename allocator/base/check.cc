#include "pinion/allocator/base/check.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {
namespace {

// Trivially destructible, because destructors of other statics may log. It uses no heap memory,
// which an unloaded library (dlclose) would leak.
constinit Mutex sink_mu;
static_assert(std::is_trivially_destructible_v<Mutex>);

// A child of fork() must find neither the lock taken by a thread that it lacks, nor a half-written
// sink. This is not a static inside a function, which would have a lock of its own.
[[maybe_unused]] const int held_across_fork =
    pthread_atfork([]() ABSL_NO_THREAD_SAFETY_ANALYSIS { sink_mu.Lock(); },
                   []() ABSL_NO_THREAD_SAFETY_ANALYSIS { sink_mu.Unlock(); },
                   []() ABSL_NO_THREAD_SAFETY_ANALYSIS { sink_mu.Unlock(); });

void LogToStandardError(LogSeverity severity, const std::string& message) {
  static constexpr const char* kNames[] = {"W", "E"};
  std::fprintf(stderr, "pinion %s %s\n", kNames[static_cast<int>(severity)], message.c_str());
}

LogSink& Sink() {
  alignas(LogSink) static char storage[sizeof(LogSink)];
  static LogSink* const sink = new (storage) LogSink(&LogToStandardError);
  return *sink;
}

const char* BaseName(const char* path) {
  const char* const slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

}  // namespace

LogSink SetLogSink(LogSink sink) {
  MutexLock lock(sink_mu);
  return std::exchange(Sink(), sink ? std::move(sink) : &LogToStandardError);
}

namespace internal {

LogMessage::LogMessage(const char* file, int line, LogSeverity severity) : severity_(severity) {
  stream_ << BaseName(file) << ':' << line << ": ";
}

LogMessage::~LogMessage() {
  LogSink sink;
  {
    MutexLock lock(sink_mu);
    sink = Sink();
  }
  sink(severity_, stream_.str());
}

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << "pinion: check failed at " << BaseName(file) << ':' << line << ": " << condition
          << ' ';
}

CheckFailure::~CheckFailure() {
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace internal
}  // namespace pinion
