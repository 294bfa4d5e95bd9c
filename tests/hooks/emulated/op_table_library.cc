// C functions for the Python programs in this folder: an emulated machine with an offload session,
// which offloads everything or has a memory target.

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/emulated/emu_device.h"

namespace pinion {
namespace {

struct World {
  std::shared_ptr<EmulatedMachine> machine;
  std::shared_ptr<OffloadSession> session;
  std::optional<OffloadScope> scope;
};

World& TheWorld() {
  static World* const world = new World;
  return *world;
}

void OpenSession(OffloadOptions offload) {
  World& world = TheWorld();
  offload.min_offload_bytes = 1;
  offload.link = AssumedLink();
  offload.allocator.segment_bytes = 16 * kMiB;
  offload.allocator.warn_percent = 100;
  offload.allocator.high_percent = 100;
  offload.allocator.low_percent = 100;
  world.session = OffloadSession::Create(offload, EmulatedBackend(world.machine)).value();
}

}  // namespace
}  // namespace pinion

extern "C" {

// Registers the machine as LibTorch's "emu".
void op_table_register() {
  pinion::EmulatedOptions options;
  options.memory_bytes = 1024 * pinion::kMiB;
  options.schedule = pinion::EffectSchedule::kRandom;
  pinion::World& world = pinion::TheWorld();
  world.machine = pinion::EmulatedMachine::Create(options).value();
  const absl::Status registered = pinion::RegisterEmuDevice(world.machine);
  PINION_CHECK(registered.ok()) << registered;
  pinion::OffloadOptions offload;
  offload.eviction_window_bytes = 1;
  offload.prefetch_window_bytes = 1;
  pinion::OpenSession(offload);
}

// Replaces the session.
void op_table_set_target(uint64_t target_bytes) {
  pinion::OffloadOptions offload;
  offload.memory_target_bytes = target_bytes;
  pinion::OpenSession(offload);
}

// Sets the device's memory limit.
void op_table_limit(uint64_t size_bytes) {
  const absl::Status limited = pinion::TheWorld().machine->SetMemoryLimit(0, size_bytes);
  PINION_CHECK(limited.ok()) << limited;
}

// Returns the peak bytes since the last call.
uint64_t op_table_take_peak() {
  pinion::EmulatedMachine& machine = *pinion::TheWorld().machine;
  const uint64_t peak_bytes = machine.memory_stats(0).peak_bytes;
  machine.ResetPeakMemory(0);
  return peak_bytes;
}

uint64_t op_table_steps_over_target() {
  return pinion::TheWorld().session->GetStats().steps_over_target;
}

// Seeds the generators of the CPU and of emu, which torch.manual_seed does not know.
void op_table_seed(uint64_t seed) { at::manual_seed(seed); }

void op_table_open_scope() {
  pinion::World& world = pinion::TheWorld();
  world.scope.emplace(world.session);
}

void op_table_close_scope() { pinion::TheWorld().scope.reset(); }

void op_table_counts(uint64_t* offloaded, uint64_t* evicted_bytes, uint64_t* fetched_bytes) {
  const pinion::OffloadStats stats = pinion::TheWorld().session->GetStats();
  *offloaded = stats.offloaded + stats.shared;
  *evicted_bytes = stats.evicted_bytes;
  *fetched_bytes = stats.fetched_bytes;
}

// Autograd numbers nodes per thread, and runs those with higher numbers first.
uint64_t op_table_sequence_number() { return at::sequence_number::peek(); }

void op_table_raise_sequence_number(uint64_t number) {
  while (at::sequence_number::peek() < number) at::sequence_number::get_and_increment();
}

}  // extern "C"
