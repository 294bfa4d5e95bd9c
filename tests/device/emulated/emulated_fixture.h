// An emulated machine, with helpers for its tests.

#ifndef PINION_TESTS_DEVICE_EMULATED_EMULATED_FIXTURE_H_
#define PINION_TESTS_DEVICE_EMULATED_EMULATED_FIXTURE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {

// Matches InvalidArgument whose message has `part`.
inline auto IsInvalid(const std::string& part) {
  return testing::StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr(part));
}

class EmulatedFixture : public ::testing::Test {
 protected:
  // Collects races instead of aborting, so that tests can inspect them.
  static EmulatedOptions Options() {
    EmulatedOptions options;
    options.memory_bytes = 64 * kMiB;
    options.abort_on_race = false;
    return options;
  }

  static EmulatedOptions TwoDevices(EmulatedOptions options = Options()) {
    options.device_count = 2;
    return options;
  }

  // Makes host calls free, so that only device times count.
  static EmulatedOptions FreeHost() {
    EmulatedOptions options = Options();
    options.preset.host_call_us = 0;
    options.preset.host_event_us = 0;
    options.preset.pin_ms_per_gib = 0;
    return options;
  }

  // Starts the machine, anew if there is one. Comes before all other calls.
  void Start(const EmulatedOptions& options) {
    source_.reset();
    device_.reset();
    machine_ = EmulatedMachine::Create(options).value();
    device_ = machine_->device(0);
    source_ = device_->pinned_source();
    compute_ = machine_->default_stream(0);
    in_ = device_->CreateStream("h2d").value();
    out_ = device_->CreateStream("d2h").value();
  }

  uint8_t* OnDevice(uint64_t size_bytes) {
    return static_cast<uint8_t*>(device_->Allocate(size_bytes, compute_).value());
  }
  uint8_t* Pinned(uint64_t size_bytes) {
    return static_cast<uint8_t*>(source_->Allocate(AlignUp(size_bytes, 4 * kKiB)).value().data);
  }
  // Memory of one size on the device and on the host.
  struct Buffers {
    uint8_t* data;
    uint8_t* host;
  };
  Buffers MakeBuffers(uint64_t size_bytes) { return {OnDevice(size_bytes), Pinned(size_bytes)}; }
  absl::Status Free(void* data) { return device_->Free(data, compute_); }

  // Launches a kernel that sets all bytes to `value`.
  void Fill(void* data, uint8_t value, uint64_t size_bytes, StreamHandle stream) {
    ASSERT_TRUE(machine_->PrepareKernel(0, stream).ok());
    std::memset(data, value, size_bytes);
    Launch("fill", {}, {{data, size_bytes}}, stream);
  }
  void Launch(const std::string& name, std::vector<ByteRange> reads, std::vector<ByteRange> writes,
              StreamHandle stream, double flops = 0) {
    Kernel kernel;
    kernel.name = name;
    kernel.reads = std::move(reads);
    kernel.writes = std::move(writes);
    kernel.flops = flops;
    const absl::Status status = machine_->Launch(0, stream, kernel);
    ASSERT_TRUE(status.ok()) << status;
  }
  absl::Status ToHost(void* dst, const void* src, uint64_t size_bytes, StreamHandle stream) {
    const CopyPiece piece = {dst, src, size_bytes};
    return device_->CopyAsync(CopyDirection::kDeviceToHost, {&piece, 1}, stream);
  }
  absl::Status ToDevice(void* dst, const void* src, uint64_t size_bytes, StreamHandle stream) {
    const CopyPiece piece = {dst, src, size_bytes};
    return device_->CopyAsync(CopyDirection::kHostToDevice, {&piece, 1}, stream);
  }
  EventHandle Record(StreamHandle stream) {
    const EventHandle event = device_->CreateEvent().value();
    EXPECT_TRUE(device_->RecordEvent(event, stream).ok());
    return event;
  }
  void Order(StreamHandle earlier, StreamHandle later) {
    ASSERT_TRUE(device_->StreamWaitEvent(later, Record(earlier)).ok());
  }
  void Synchronize(StreamHandle stream) {
    const absl::Status status = device_->SynchronizeStream(stream);
    ASSERT_TRUE(status.ok()) << status;
  }
  MemoryStats Memory() { return machine_->memory_stats(0); }

  std::shared_ptr<EmulatedMachine> machine_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<HostMemorySource> source_;
  StreamHandle compute_, in_, out_;
};

}  // namespace pinion

#endif  // PINION_TESTS_DEVICE_EMULATED_EMULATED_FIXTURE_H_
