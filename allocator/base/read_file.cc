#include "pinion/allocator/base/read_file.h"

#include <fcntl.h>
#include <unistd.h>

#include "absl/cleanup/cleanup.h"

namespace pinion {

std::string ReadFile(const std::string& path) {
  std::string text;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  const absl::Cleanup close_file = [file] { close(file); };
  char part[4096];
  for (ssize_t size = 0; (size = read(file, part, sizeof(part))) > 0;) text.append(part, size);
  return text;
}

}  // namespace pinion
