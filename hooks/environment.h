// Switches in the environment, which work without a rebuild: PINION_DISABLE=1, PINION_VERIFY=1.
//
// Thread safety: as getenv's: nobody changes the environment meanwhile.

#ifndef PINION_HOOKS_ENVIRONMENT_H_
#define PINION_HOOKS_ENVIRONMENT_H_

#include <cstdlib>
#include <string_view>

namespace pinion {

inline bool SwitchedOnByEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace pinion

#endif  // PINION_HOOKS_ENVIRONMENT_H_
