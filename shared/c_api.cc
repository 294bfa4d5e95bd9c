#include "pinion/shared/c_api.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/pin_memory/torch_host_allocator.h"
#include "pinion/shared/backend_by_name.h"

namespace pinion {
namespace {

thread_local std::string last_error;
thread_local std::string last_stats;

// Runs `call` without letting exceptions reach C. Returns whether `call` returned OK.
template <typename Call>
bool Succeeds(const Call& call) {
  last_error.clear();
  try {
    if (const absl::Status status = call(); !status.ok()) last_error = status.ToString();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return last_error.empty();
}

AllocatorOptions OptionsOf(uint64_t max_locked_bytes, double high_percent, uint64_t segment_bytes) {
  AllocatorOptions options;
  if (const char* const directory = std::getenv("PINION_LEDGER_DIRECTORY")) {
    options.ledger_directory = directory;
  }
  options.segment_bytes = segment_bytes != 0 ? segment_bytes : PINION_DEFAULT_SEGMENT_BYTES;
  if (max_locked_bytes != 0) options.max_locked_bytes = max_locked_bytes;
  if (high_percent != 0) {
    // Keeps the default distance, so that the level does not flicker; half of a low percentage.
    const double gap = options.high_percent - options.low_percent;
    options.low_percent = std::max(high_percent - gap, high_percent / 2);
    options.warn_percent = std::min(options.warn_percent, high_percent);
    options.high_percent = high_percent;
  }
  return options;
}

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

}  // namespace
}  // namespace pinion

int pinion_install_torch_host_allocator(const char* device_type, uint64_t max_locked_bytes,
                                        double high_percent, uint64_t segment_bytes) {
  const bool installed = pinion::Succeeds([&]() -> absl::Status {
    PINION_ASSIGN_OR_RETURN(const pinion::DeviceBackend backend,
                            pinion::BackendByName(pinion::TextOf(device_type)));
    return pinion::InstallTorchHostAllocator(
        pinion::OptionsOf(max_locked_bytes, high_percent, segment_bytes), backend);
  });
  return installed ? 0 : -1;
}

const char* pinion_torch_host_memory_stats(const char* device_type) {
  const bool found = pinion::Succeeds([&]() -> absl::Status {
    PINION_ASSIGN_OR_RETURN(const auto stats,
                            pinion::TorchHostMemoryStats(pinion::TextOf(device_type)));
    pinion::last_stats = nlohmann::json(stats).dump();
    return absl::OkStatus();
  });
  return found ? pinion::last_stats.c_str() : nullptr;
}

const char* pinion_last_error() { return pinion::last_error.c_str(); }
