#include "pinion/programs/output_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

std::string TemporaryPath(const std::string& path) {
  return absl::StrCat(path, ".partial-", getpid());
}

absl::Status CannotWrite(const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat("cannot write ", path, ": ", why));
}

}  // namespace

absl::Status CheckWritable(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    return CannotWrite(path, "it exists and is not a regular file");
  }
  const std::string temporary = TemporaryPath(path);
  const bool opened = std::ofstream(temporary).is_open();
  const int opening_errno = errno;
  std::filesystem::remove(temporary, error);
  return opened ? absl::OkStatus() : CannotWrite(path, std::strerror(opening_errno));
}

absl::Status WriteAtomically(const std::string& path,
                             absl::FunctionRef<absl::Status(const std::string& temporary)> write) {
  const std::string temporary = TemporaryPath(path);
  const auto remove = absl::MakeCleanup([&temporary] {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
  });
  PINION_RETURN_IF_ERROR(write(temporary));
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  return error ? CannotWrite(path, error.message()) : absl::OkStatus();
}

absl::Status WriteAtomically(const std::string& path, const std::string& contents) {
  return WriteAtomically(path, [&](const std::string& temporary) {
    std::ofstream file(temporary, std::ios::binary);
    file << contents;
    file.close();
    return file ? absl::OkStatus() : CannotWrite(path, std::strerror(errno));
  });
}

}  // namespace pinion
