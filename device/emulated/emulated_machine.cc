#include "pinion/device/emulated/emulated_machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/machine_core.h"
#include "pinion/device/emulated/memory_arena.h"

namespace pinion {

absl::Status EmulatedOptions::Validate() const {
  if (device_count < 1 || device_count > 64) {
    return absl::InvalidArgumentError("device_count is " + std::to_string(device_count) +
                                      "; it must be between 1 and 64");
  }
  if (memory_bytes == 0 || memory_bytes > (uint64_t{1} << 40)) {
    return absl::InvalidArgumentError("memory_bytes is " + std::to_string(memory_bytes) +
                                      "; it must be between 1 and 1 TiB");
  }
  PINION_RETURN_IF_ERROR(faults.Validate());
  return preset.Validate();
}

absl::StatusOr<std::shared_ptr<EmulatedMachine>> EmulatedMachine::Create(
    const EmulatedOptions& options) {
  PINION_RETURN_IF_ERROR(options.Validate());
  std::vector<std::unique_ptr<MemoryArena>> arenas;
  for (int i = 0; i < options.device_count; ++i) {
    // Addresses are free: four times the memory, so that no fragmentation is ever out of memory
    // (SetMemoryLimit may double it). Only pages that are written cost anything.
    const uint64_t reserve_bytes = std::max(64 * kMiB, 4 * options.memory_bytes);
    void* const mapping = mmap(nullptr, reserve_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      return absl::ResourceExhaustedError("cannot reserve " + HumanBytes(reserve_bytes) +
                                          " of addresses for device " + std::to_string(i) + ": " +
                                          std::strerror(errno));
    }
    arenas.push_back(std::make_unique<MemoryArena>(mapping, reserve_bytes,
                                                   options.reuse == ReuseMode::kQuarantine));
  }
  return std::make_shared<MachineCore>(options, std::move(arenas));
}

}  // namespace pinion
