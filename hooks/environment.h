// Switches in the environment, which work without a rebuild: PINION_DISABLE=1, PINION_VERIFY=1.
//
// What is on is named in the log of each session, since a switch that somebody forgot looks like a
// library that does nothing, or a slow one.
//
// Thread safety: as getenv's: nobody changes the environment meanwhile.

#ifndef PINION_HOOKS_ENVIRONMENT_H_
#define PINION_HOOKS_ENVIRONMENT_H_

#include <cstdlib>
#include <string>
#include <string_view>

namespace pinion {

inline bool SwitchedOnByEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

// The switches that are on and what they do, for people; empty without any.
inline std::string SwitchesThatAreOn() {
  // Where nothing is offloaded, nothing is checked.
  if (SwitchedOnByEnvironment("PINION_DISABLE")) return "PINION_DISABLE=1 (nothing is offloaded)";
  if (SwitchedOnByEnvironment("PINION_VERIFY")) {
    return "PINION_VERIFY=1 (what comes back is checked, which waits for the device: steps take "
           "longer)";
  }
  return "";
}

}  // namespace pinion

#endif  // PINION_HOOKS_ENVIRONMENT_H_
