// Data files of a program, which //tools/portable copies to share/.
//
// Thread safety: thread-safe.

#ifndef PINION_PROGRAMS_SHARED_DATA_H_
#define PINION_PROGRAMS_SHARED_DATA_H_

#include <string>

namespace pinion {

// Returns share/`name` beside the program's folder; empty if it does not exist, as for a program in
// Bazel's output.
std::string SharedDataPath(const std::string& name);

}  // namespace pinion

#endif  // PINION_PROGRAMS_SHARED_DATA_H_
