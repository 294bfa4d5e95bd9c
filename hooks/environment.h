// Switches in the environment, which work without a rebuild: PINION_DISABLE=1, PINION_VERIFY=1.
// And one of CUDA's own that slows offload down.
// "true" and "yes" say the same as 1; "0", "false" and "no" that a switch is off.
//
// Sessions, streamed weights and attribution log which switches are on: a forgotten one looks like
// a library that does nothing, or a slow one. They also log values that say neither.
//
// Thread safety: as getenv's: nobody changes the environment meanwhile.

#ifndef PINION_HOOKS_ENVIRONMENT_H_
#define PINION_HOOKS_ENVIRONMENT_H_

#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "pinion/allocator/base/check.h"

namespace pinion {

inline bool SwitchedOnByEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  bool on = false;
  return value != nullptr && absl::SimpleAtob(value, &on) && on;
}

// "PINION_DISABLE=maybe": a switch with a value that says neither on nor off; empty without any.
inline std::string SwitchNotUnderstood() {
  for (const char* name : {"PINION_DISABLE", "PINION_VERIFY"}) {
    const char* const value = std::getenv(name);
    bool on = false;
    if (value == nullptr || *value == '\0' || absl::SimpleAtob(value, &on)) continue;
    return std::string(name) + "=" + value;
  }
  return "";
}

// What is on, for a session on such a device, and what it does, for people; empty without any.
inline std::string SwitchesThatAreOn(const std::string& device_type = "", bool verifies = true) {
  // Where nothing is offloaded, nothing is checked.
  if (SwitchedOnByEnvironment("PINION_DISABLE")) return "PINION_DISABLE=1 (nothing is offloaded)";
  std::string on;
  if (verifies && SwitchedOnByEnvironment("PINION_VERIFY")) {
    on = "PINION_VERIFY=1 (what comes back is checked, which waits for the device: steps take "
         "longer)";
  }
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (device_type == "cuda" && connections != nullptr && std::string(connections) == "1") {
    on += std::string(on.empty() ? "" : " and ") +
          "CUDA_DEVICE_MAX_CONNECTIONS=1 (copies and kernels may wait for each other: unset it, "
          "unless your parallelism needs it)";
  }
  return on;
}

// Logs the switches that concern `user`, such as "a session", and values that say neither.
// `verifies`: whether PINION_VERIFY concerns it.
inline void WarnOfSwitches(const char* user, const std::string& device_type, bool verifies) {
  if (const std::string on = SwitchesThatAreOn(device_type, verifies); !on.empty()) {
    PINION_LOG(kWarning) << user << " for " << device_type << " begins with " << on;
  }
  if (const std::string unclear = SwitchNotUnderstood(); !unclear.empty()) {
    PINION_LOG(kWarning) << unclear << " switches nothing on: set it to 1, or unset it";
  }
}

}  // namespace pinion

#endif  // PINION_HOOKS_ENVIRONMENT_H_
