#include "pinion/allocator/base/bytes.h"

#include <cstdio>

namespace pinion {

std::string HumanBytes(uint64_t size_bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(size_bytes);
  int unit = 0;
  // 1023.5 would print as "1.02e+03".
  while (value >= 999.5) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g %s", value, kUnits[unit]);
  return text;
}

}  // namespace pinion
