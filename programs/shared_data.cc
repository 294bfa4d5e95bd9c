#include "pinion/programs/shared_data.h"

#include <filesystem>
#include <string>
#include <system_error>

namespace pinion {

std::string SharedDataPath(const std::string& name) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path path = program.parent_path().parent_path() / "share" / name;
  return std::filesystem::exists(path, error) ? path.string() : "";
}

}  // namespace pinion
