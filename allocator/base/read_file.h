// Reads a small file, such as those of /proc and /sys.
//
//   const std::string text = ReadFile("/proc/meminfo");  // "" if there is no such file
//
// Throws std::bad_alloc when the C++ heap is full. (A stream would return an empty text, which
// callers would take for "no limit".)
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_BASE_READ_FILE_H_
#define PINION_ALLOCATOR_BASE_READ_FILE_H_

#include <string>

namespace pinion {

std::string ReadFile(const std::string& path);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_READ_FILE_H_
