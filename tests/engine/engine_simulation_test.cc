// Random programs on two devices with three streams each, against a model of what every byte must
// be.
//
// The program follows the engine's contract: it waits for a transfer on the stream that uses the
// tensor next, and leaves everything else (copies of other streams and of the other device on the
// same host buffer, reuse of blocks) to the engine. Then whatever order the emulated accelerator
// picks, the bytes are those of the program's own order, and nothing races.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/engine/wait_site.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::EngineWorld;
using ::pinion::testing::IsOk;
using ::pinion::testing::Pattern;
using ::pinion::testing::TestMachineOptions;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kOperations = 220;
constexpr int kDevices = 2;
constexpr int kStreams = 3;
constexpr uint64_t kMaxSize = 8'000;  // copies of a byte and of whole pages

struct Tensor {
  int device = 0;
  uint8_t* data = nullptr;
  int stream = 0;               // the one that uses it
  std::vector<uint8_t> bytes;   // the model
  std::vector<Transfer> reads;  // copies out of it that `stream` has not waited for
  std::vector<Transfer> writes;
};

struct HostCopy {
  std::shared_ptr<HostBuffer> buffer;
  std::vector<uint8_t> bytes;  // the model
};

class Simulation {
 public:
  Simulation(uint32_t seed, const EmulatedOptions& machine_options,
             const EngineOptions& engine_options)
      : random_(seed), world_(machine_options, engine_options) {
    for (int device = 0; device < kDevices; ++device) {
      streams_[device][0] = world_.compute(device);
      for (int i = 1; i < kStreams; ++i) streams_[device][i] = world_.NewStream(device);
    }
    for (int i = 0; i < 6; ++i) NewTensor();
    for (int i = 0; i < 4; ++i) NewHostCopy();
  }

  void Run() {
    for (int i = 0; i < kOperations && !::testing::Test::HasFailure(); ++i) Step();
    while (!tensors_.empty()) FreeTensor(0);
    while (!hosts_.empty()) DropHostCopy(0);
    for (int device = 0; device < kDevices; ++device) {
      ASSERT_THAT(world_.engine(device).Drain(kLong), IsOk());
      EXPECT_EQ(world_.machine().memory_stats(device).in_use_bytes, 0u);
    }
    EXPECT_THAT(world_.machine().races(), IsEmpty());
    ASSERT_THAT(world_.allocator().Trim(0), IsOk());
    EXPECT_EQ(world_.allocator().GetStats().locked_bytes.current, 0u);
    EXPECT_THAT(world_.allocator().GetStats().CheckInvariants(), IsOk());
  }

 private:
  uint64_t Pick(uint64_t count) { return random_() % count; }
  StreamHandle StreamOf(const Tensor& tensor) { return streams_[tensor.device][tensor.stream]; }

  void Step() {
    switch (Pick(12)) {
      case 0:
        return NewTensor();
      case 1:
        return tensors_.size() > 3 ? FreeTensor(Pick(tensors_.size())) : NewTensor();
      case 2:
        return NewHostCopy();
      case 3:
        return hosts_.size() > 2 ? DropHostCopy(Pick(hosts_.size())) : NewHostCopy();
      case 4:
        return WriteTensor(tensors_[Pick(tensors_.size())]);
      case 5:
        return CheckTensor(tensors_[Pick(tensors_.size())]);
      case 6:
        return CheckHostCopy(hosts_[Pick(hosts_.size())]);
      case 7:
        return MoveTensor(tensors_[Pick(tensors_.size())]);
      case 8:
        return world_.engine(Pick(kDevices)).Poll();
      default:
        return Transfers(Pick(2) == 0 ? CopyDirection::kDeviceToHost
                                      : CopyDirection::kHostToDevice);
    }
  }

  void NewTensor() {
    Tensor tensor;
    tensor.device = Pick(kDevices);
    const uint64_t size_bytes = 1 + Pick(kMaxSize);
    tensor.data = world_.AllocateDevice(size_bytes, tensor.device);
    tensor.bytes = Pattern(++patterns_, size_bytes);
    world_.WriteDevice(tensor.data, tensor.bytes, StreamOf(tensor), tensor.device);
    tensors_.push_back(std::move(tensor));
  }

  void FreeTensor(size_t index) {
    Tensor& tensor = tensors_[index];
    CheckTensor(tensor);
    UseOnStream(tensor, 0);
    world_.FreeDevice(tensor.data, tensor.device);
    tensors_.erase(tensors_.begin() + index);
  }

  void NewHostCopy() {
    HostCopy host;
    const uint64_t size_bytes = 1 + Pick(2 * kMaxSize);
    host.buffer = world_.NewHostBuffer(size_bytes);
    host.bytes = Pattern(++patterns_, size_bytes);
    // A block comes back only after all of its copies, so the host may write to it at once.
    world_.WriteHost(*host.buffer, host.bytes);
    hosts_.push_back(std::move(host));
  }

  void DropHostCopy(size_t index) {
    if (Pick(2) == 0) CheckHostCopy(hosts_[index]);
    hosts_.erase(hosts_.begin() + index);
  }

  void WaitForReads(Tensor& tensor) {
    for (const Transfer& read : tensor.reads) {
      ASSERT_THAT(read.WaitOn(StreamOf(tensor), WaitSite::kEvictAfterCopyOut), IsOk());
    }
    tensor.reads.clear();
  }

  void WaitForWrites(Tensor& tensor) {
    for (const Transfer& write : tensor.writes) {
      ASSERT_THAT(write.WaitOn(StreamOf(tensor), WaitSite::kUnpackAfterCopyIn), IsOk());
    }
    tensor.writes.clear();
  }

  // Gives the tensor to another stream of its device.
  void UseOnStream(Tensor& tensor, int stream) {
    WaitForReads(tensor);
    WaitForWrites(tensor);
    ASSERT_THAT(world_.engine(tensor.device)
                    .OrderStreams(StreamOf(tensor), streams_[tensor.device][stream],
                                  WaitSite::kUnpackOnOtherStream),
                IsOk());
    tensor.stream = stream;
  }

  void MoveTensor(Tensor& tensor) { UseOnStream(tensor, Pick(kStreams)); }

  void WriteTensor(Tensor& tensor) {
    WaitForReads(tensor);
    WaitForWrites(tensor);
    tensor.bytes = Pattern(++patterns_, tensor.bytes.size());
    world_.WriteDevice(tensor.data, tensor.bytes, StreamOf(tensor), tensor.device);
    if (Pick(4) == 0) {
      const absl::StatusOr<FenceTicket> mark = world_.engine(tensor.device).Mark(StreamOf(tensor));
      ASSERT_THAT(mark, IsOk());
      if (Pick(2) == 0) {
        ASSERT_THAT(mark->timeline->Wait(mark->value, kLong), IsOk());
        EXPECT_TRUE(mark->IsDone());
      }
    }
  }

  void CheckTensor(Tensor& tensor) {
    WaitForWrites(tensor);
    EXPECT_EQ(world_.ReadDevice(tensor.data, tensor.bytes.size(), StreamOf(tensor), tensor.device),
              tensor.bytes);
  }

  void CheckHostCopy(HostCopy& host) {
    for (const FenceTicket& ticket : host.buffer->tickets()) {
      ASSERT_THAT(ticket.timeline->Wait(ticket.value, kLong), IsOk());
    }
    EXPECT_EQ(world_.ReadHost(*host.buffer), host.bytes);
  }

  // Some tensors of one stream, in one batch, each in pieces to or from its own host buffer.
  void Transfers(CopyDirection direction) {
    const size_t first = Pick(tensors_.size());
    const int device = tensors_[first].device;
    const int stream = tensors_[first].stream;
    std::vector<HostCopy*> hosts;
    for (HostCopy& host : hosts_) hosts.push_back(&host);
    std::shuffle(hosts.begin(), hosts.end(), random_);
    const size_t most = 1 + Pick(3);

    CopyBatch batch(direction);
    std::vector<Tensor*> moved;
    for (size_t i = 0; i < tensors_.size() && moved.size() < most && !hosts.empty(); ++i) {
      Tensor& tensor = tensors_[(first + i) % tensors_.size()];
      if (tensor.device != device || tensor.stream != stream) continue;
      if (direction == CopyDirection::kHostToDevice) WaitForReads(tensor);
      WaitForWrites(tensor);
      AddPieces(tensor, *hosts.back(), batch);
      hosts.pop_back();
      moved.push_back(&tensor);
    }
    if (batch.empty()) return;
    const absl::StatusOr<Transfer> transfer =
        world_.engine(device).Submit(std::move(batch), streams_[device][stream]);
    ASSERT_THAT(transfer, IsOk());
    for (Tensor* tensor : moved) {
      (direction == CopyDirection::kDeviceToHost ? tensor->reads : tensor->writes)
          .push_back(*transfer);
    }
  }

  // The same range of both, at different offsets, in a few pieces of any order.
  void AddPieces(Tensor& tensor, HostCopy& host, CopyBatch& batch) {
    const uint64_t size_bytes = 1 + Pick(std::min(tensor.bytes.size(), host.bytes.size()));
    const uint64_t tensor_begin = Pick(tensor.bytes.size() - size_bytes + 1);
    const uint64_t host_begin = Pick(host.bytes.size() - size_bytes + 1);
    std::vector<std::pair<uint64_t, uint64_t>> pieces;
    for (uint64_t begin = 0; begin < size_bytes;) {
      const uint64_t piece = std::min(size_bytes - begin, 1 + Pick(kMaxSize));
      pieces.emplace_back(begin, piece);
      begin += piece;
    }
    std::shuffle(pieces.begin(), pieces.end(), random_);
    for (const auto& [begin, piece] : pieces) {
      batch.Add(host.buffer, host_begin + begin, tensor.data + tensor_begin + begin, piece);
    }
    if (batch.direction() == CopyDirection::kDeviceToHost) {
      std::copy_n(tensor.bytes.begin() + tensor_begin, size_bytes, host.bytes.begin() + host_begin);
    } else {
      std::copy_n(host.bytes.begin() + host_begin, size_bytes, tensor.bytes.begin() + tensor_begin);
    }
  }

  std::mt19937 random_;
  EngineWorld world_;
  StreamHandle streams_[kDevices][kStreams];
  std::vector<Tensor> tensors_;
  std::vector<HostCopy> hosts_;
  uint64_t patterns_ = 0;
};

class EngineSimulationTest
    : public ::testing::TestWithParam<std::tuple<EffectSchedule, ReuseMode>> {};

TEST_P(EngineSimulationTest, EveryByteIsWhatTheProgramSays) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EmulatedOptions machine_options = TestMachineOptions();
    machine_options.device_count = kDevices;
    machine_options.memory_bytes = kMiB;
    machine_options.protect_host_pages = true;
    machine_options.seed = seed;
    std::tie(machine_options.schedule, machine_options.reuse) = GetParam();
    EngineOptions engine_options;
    if (seed % 2 == 0) engine_options.max_in_flight_bytes = 4 * kKiB;
    Simulation(seed, machine_options, engine_options).Run();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllSchedules, EngineSimulationTest,
    ::testing::Combine(::testing::Values(EffectSchedule::kEarly, EffectSchedule::kLate,
                                         EffectSchedule::kRandom),
                       ::testing::Values(ReuseMode::kImmediate, ReuseMode::kQuarantine)));

}  // namespace
}  // namespace pinion
