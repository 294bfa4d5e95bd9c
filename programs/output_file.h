// Files that a program writes at its end: checked at its start, and never left half-written.
//
// Thread safety: thread-safe for different paths.

#ifndef PINION_PROGRAMS_OUTPUT_FILE_H_
#define PINION_PROGRAMS_OUTPUT_FILE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace pinion {

// Whether `path` could be written now, without leaving a trace. The error names `path` and why.
absl::Status CheckWritable(const std::string& path);

// Calls `write` with the path of a temporary file in the same directory, then renames that to
// `path`. When either fails, what was at `path` before is untouched and the temporary is gone.
absl::Status WriteAtomically(const std::string& path,
                             absl::FunctionRef<absl::Status(const std::string& temporary)> write);
absl::Status WriteAtomically(const std::string& path, const std::string& contents);

}  // namespace pinion

#endif  // PINION_PROGRAMS_OUTPUT_FILE_H_
