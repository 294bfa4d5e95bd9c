// An emulated machine with one engine per device, and helpers that check bytes.

#ifndef PINION_TESTS_ENGINE_ENGINE_WORLD_H_
#define PINION_TESTS_ENGINE_ENGINE_WORLD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion::testing {

// Returns bytes that differ between seeds and are not all equal.
std::vector<uint8_t> Pattern(uint64_t seed, uint64_t size_bytes);

// Returns options with little memory that collect races instead of aborting.
EmulatedOptions TestMachineOptions();

// Returns `options` with chunks of at most this many bytes.
EngineOptions Chunks(uint64_t bytes, EngineOptions options = {});

class EngineWorld {
 public:
  explicit EngineWorld(const EmulatedOptions& machine_options = TestMachineOptions(),
                       const EngineOptions& engine_options = {});
  // Uses `device`, a wrapper of machine->device(0), for the engine of device 0.
  EngineWorld(std::shared_ptr<EmulatedMachine> machine, std::shared_ptr<Device> device,
              const EngineOptions& engine_options);

  EmulatedMachine& machine() { return *machine_; }
  TransferEngine& engine(int device = 0) { return *engines_[device]; }
  // Releases the last reference to a device's engine.
  void DestroyEngine(int device = 0) { engines_[device].reset(); }
  PinnedAllocator& allocator() { return *allocator_; }
  StreamHandle compute(int device = 0) { return machine_->default_stream(device); }
  StreamHandle NewStream(int device = 0);

  // Each fails the test if a call fails. Streams are compute(device) by default.
  std::shared_ptr<HostBuffer> NewHostBuffer(uint64_t size_bytes);
  std::shared_ptr<HostBuffer> NewHostBuffer(const std::vector<uint8_t>& bytes);
  uint8_t* AllocateDevice(uint64_t size_bytes, int device = 0);  // on compute(device)
  uint8_t* AllocateDevice(const std::vector<uint8_t>& bytes, int device = 0);
  void FreeDevice(void* data, int device = 0);
  // Launch a kernel on `stream` that writes `bytes`, or one that reads and returns them.
  void WriteDevice(void* data, const std::vector<uint8_t>& bytes,
                   std::optional<StreamHandle> stream = {}, int device = 0);
  std::vector<uint8_t> ReadDevice(const void* data, uint64_t size_bytes,
                                  std::optional<StreamHandle> stream = {}, int device = 0);
  // Launches a kernel that takes years and accesses no memory.
  void Jam(StreamHandle stream, int device = 0);
  // Access pinned memory from the host, visibly to the race detector.
  void WriteHost(HostBuffer& buffer, const std::vector<uint8_t>& bytes);
  std::vector<uint8_t> ReadHost(const HostBuffer& buffer);

  // Submits on device 0 after the present work of compute().
  Transfer Submit(CopyBatch batch);
  // Copy the whole buffer in one piece after the present work of `after`.
  absl::StatusOr<Transfer> TryCopyOut(const std::shared_ptr<HostBuffer>& host, void* data,
                                      std::optional<StreamHandle> after = {}, int device = 0);
  absl::StatusOr<Transfer> TryCopyIn(const std::shared_ptr<HostBuffer>& host, void* data,
                                     std::optional<StreamHandle> after = {}, int device = 0);
  Transfer CopyOut(const std::shared_ptr<HostBuffer>& host, void* data,
                   std::optional<StreamHandle> after = {}, int device = 0);
  Transfer CopyIn(const std::shared_ptr<HostBuffer>& host, void* data,
                  std::optional<StreamHandle> after = {}, int device = 0);
  // The same between new memory, for tests in which the bytes do not matter.
  absl::StatusOr<Transfer> TryCopyOut(uint64_t size_bytes);
  absl::StatusOr<Transfer> TryCopyIn(uint64_t size_bytes);
  Transfer CopyOut(uint64_t size_bytes);
  Transfer CopyIn(uint64_t size_bytes);

 private:
  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<PinnedAllocator> allocator_;
  std::vector<std::shared_ptr<TransferEngine>> engines_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_ENGINE_WORLD_H_
