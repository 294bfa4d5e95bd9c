#include "pinion/tests/engine/engine_world.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion::testing {
namespace {

template <typename T>
T Value(absl::StatusOr<T> result) {
  PINION_CHECK(result.ok()) << result.status().ToString();
  return *std::move(result);
}

void Ok(const absl::Status& status) { PINION_CHECK(status.ok()) << status.ToString(); }

std::shared_ptr<PinnedAllocator> SmallAllocator(EmulatedMachine& machine) {
  const std::shared_ptr<HostMemorySource> source = machine.device(0)->pinned_source();
  AllocatorOptions options;
  options.segment_bytes = std::max(source->granularity_bytes(), uint64_t{4} * kMiB);
  // Does not depend on other users of this host's RAM.
  return Value(PinnedAllocator::Create(options, source, FakeHost().Probe()));
}

}  // namespace

std::vector<uint8_t> Pattern(uint64_t seed, uint64_t size_bytes) {
  std::vector<uint8_t> bytes(size_bytes);
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (uint8_t& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return bytes;
}

EmulatedOptions TestMachineOptions() {
  EmulatedOptions options;
  options.memory_bytes = 64 * kMiB;
  options.abort_on_race = false;
  return options;
}

EngineOptions Chunks(uint64_t bytes, EngineOptions options) {
  options.max_chunk_bytes = bytes;
  return options;
}

EngineWorld::EngineWorld(const EmulatedOptions& machine_options,
                         const EngineOptions& engine_options)
    : machine_(Value(EmulatedMachine::Create(machine_options))),
      allocator_(SmallAllocator(*machine_)) {
  for (int i = 0; i < machine_->device_count(); ++i) {
    engines_.push_back(Value(TransferEngine::Create(engine_options, machine_->device(i))));
  }
}

EngineWorld::EngineWorld(std::shared_ptr<EmulatedMachine> machine, std::shared_ptr<Device> device,
                         const EngineOptions& engine_options)
    : machine_(std::move(machine)),
      allocator_(SmallAllocator(*machine_)),
      engines_({Value(TransferEngine::Create(engine_options, std::move(device)))}) {}

StreamHandle EngineWorld::NewStream(int device) {
  return Value(machine_->device(device)->CreateStream("test"));
}

std::shared_ptr<HostBuffer> EngineWorld::NewHostBuffer(uint64_t size_bytes) {
  return std::make_shared<HostBuffer>(Value(allocator_->Allocate(size_bytes)));
}

std::shared_ptr<HostBuffer> EngineWorld::NewHostBuffer(const std::vector<uint8_t>& bytes) {
  std::shared_ptr<HostBuffer> buffer = NewHostBuffer(bytes.size());
  WriteHost(*buffer, bytes);
  return buffer;
}

uint8_t* EngineWorld::AllocateDevice(uint64_t size_bytes, int device) {
  return static_cast<uint8_t*>(
      Value(machine_->device(device)->Allocate(size_bytes, compute(device))));
}

uint8_t* EngineWorld::AllocateDevice(const std::vector<uint8_t>& bytes, int device) {
  uint8_t* const data = AllocateDevice(bytes.size(), device);
  WriteDevice(data, bytes, compute(device), device);
  return data;
}

void EngineWorld::FreeDevice(void* data, int device) {
  Ok(machine_->device(device)->Free(data, compute(device)));
}

void EngineWorld::WriteDevice(void* data, const std::vector<uint8_t>& bytes,
                              std::optional<StreamHandle> stream, int device) {
  const StreamHandle on = stream.value_or(compute(device));
  Ok(machine_->PrepareKernel(device, on));
  std::memcpy(data, bytes.data(), bytes.size());
  Kernel kernel;
  kernel.name = "write";
  kernel.writes = {{data, bytes.size()}};
  Ok(machine_->Launch(device, on, kernel));
}

std::vector<uint8_t> EngineWorld::ReadDevice(const void* data, uint64_t size_bytes,
                                             std::optional<StreamHandle> stream, int device) {
  const StreamHandle on = stream.value_or(compute(device));
  Ok(machine_->PrepareKernel(device, on));
  std::vector<uint8_t> bytes(size_bytes);
  std::memcpy(bytes.data(), data, size_bytes);
  Kernel kernel;
  kernel.name = "read";
  kernel.reads = {{data, size_bytes}};
  Ok(machine_->Launch(device, on, kernel));
  return bytes;
}

void EngineWorld::Jam(StreamHandle stream, int device) {
  Kernel kernel;
  kernel.name = "year long";
  kernel.flops = 1e22;
  Ok(machine_->PrepareKernel(device, stream));
  Ok(machine_->Launch(device, stream, kernel));
}

void EngineWorld::WriteHost(HostBuffer& buffer, const std::vector<uint8_t>& bytes) {
  PINION_CHECK(bytes.size() == buffer.size_bytes());
  Ok(machine_->HostAccess(buffer.data(), bytes.size(), /*write=*/true));
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
}

std::vector<uint8_t> EngineWorld::ReadHost(const HostBuffer& buffer) {
  Ok(machine_->HostAccess(buffer.data(), buffer.size_bytes(), /*write=*/false));
  const auto* data = static_cast<const uint8_t*>(buffer.data());
  return {data, data + buffer.size_bytes()};
}

Transfer EngineWorld::Submit(CopyBatch batch) {
  return Value(engine().Submit(std::move(batch), compute()));
}

absl::StatusOr<Transfer> EngineWorld::TryCopyOut(const std::shared_ptr<HostBuffer>& host,
                                                 void* data, std::optional<StreamHandle> after,
                                                 int device) {
  CopyBatch batch(CopyDirection::kDeviceToHost);
  batch.Add(host, 0, data, host->size_bytes());
  return engine(device).Submit(std::move(batch), after.value_or(compute(device)));
}

absl::StatusOr<Transfer> EngineWorld::TryCopyIn(const std::shared_ptr<HostBuffer>& host, void* data,
                                                std::optional<StreamHandle> after, int device) {
  CopyBatch batch(CopyDirection::kHostToDevice);
  batch.Add(host, 0, data, host->size_bytes());
  return engine(device).Submit(std::move(batch), after.value_or(compute(device)));
}

Transfer EngineWorld::CopyOut(const std::shared_ptr<HostBuffer>& host, void* data,
                              std::optional<StreamHandle> after, int device) {
  return Value(TryCopyOut(host, data, after, device));
}

Transfer EngineWorld::CopyIn(const std::shared_ptr<HostBuffer>& host, void* data,
                             std::optional<StreamHandle> after, int device) {
  return Value(TryCopyIn(host, data, after, device));
}

absl::StatusOr<Transfer> EngineWorld::TryCopyOut(uint64_t size_bytes) {
  return TryCopyOut(NewHostBuffer(size_bytes), AllocateDevice(size_bytes));
}

absl::StatusOr<Transfer> EngineWorld::TryCopyIn(uint64_t size_bytes) {
  return TryCopyIn(NewHostBuffer(size_bytes), AllocateDevice(size_bytes));
}

Transfer EngineWorld::CopyOut(uint64_t size_bytes) { return Value(TryCopyOut(size_bytes)); }

Transfer EngineWorld::CopyIn(uint64_t size_bytes) { return Value(TryCopyIn(size_bytes)); }

}  // namespace pinion::testing
