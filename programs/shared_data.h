// Data that travels with a program: what //tools/portable puts into share/.
//
// Thread safety: thread-safe.

#ifndef PINION_PROGRAMS_SHARED_DATA_H_
#define PINION_PROGRAMS_SHARED_DATA_H_

#include <string>

namespace pinion {

// The path of share/`name` beside the running program's folder; empty where there is none, as for
// a program that Bazel has built and nobody has collected.
std::string SharedDataPath(const std::string& name);

}  // namespace pinion

#endif  // PINION_PROGRAMS_SHARED_DATA_H_
