// Output files of programs: checked at the start, and never partially written.
//
// Thread safety: thread-safe for different paths.

#ifndef PINION_PROGRAMS_OUTPUT_FILE_H_
#define PINION_PROGRAMS_OUTPUT_FILE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace pinion {

// Returns OK if `path` could be written, without creating it. The error names `path` and the cause.
absl::Status CheckWritable(const std::string& path);

// Calls `write` with a temporary file in the same directory and renames it to `path`. If either
// fails, `path` is unchanged and the temporary file is removed.
absl::Status WriteAtomically(const std::string& path,
                             absl::FunctionRef<absl::Status(const std::string& temporary)> write);
absl::Status WriteAtomically(const std::string& path, const std::string& contents);

}  // namespace pinion

#endif  // PINION_PROGRAMS_OUTPUT_FILE_H_
