#include "pinion/tests/engine/engine_simulation.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/test_waits.h"

namespace pinion::testing {
namespace {

constexpr int kOperations = 220;
constexpr int kDevices = 2;
constexpr int kStreams = 3;
constexpr uint64_t kMaxSize = 8'000;                     // from a byte to whole pages
constexpr absl::Duration kPatience = absl::Seconds(10);  // much longer than any slow operation
constexpr double kSlowFlops = 1e12;                      // some 15 ms
constexpr double kStuckFlops = 1e22;                     // years

// A seed whose world ends earlier, because both devices are lost, continues in a new one.
constexpr uint64_t kLeastOperations = 200;

using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

struct Scenario {
  EmulatedOptions machine;
  EngineOptions engine;
  bool may_lose_device = false;  // a sticky fault, or faults beyond the engine's retries
  bool may_be_stuck = false;
  int stuck_kernel_at = -1;  // the operation before which a stream gets a kernel of years
};

Scenario DrawScenario(uint64_t seed, Random& random) {
  const auto pick = [&random](uint64_t count) { return random() % count; };
  Scenario scenario;
  EmulatedOptions& machine = scenario.machine;
  machine = TestMachineOptions();
  machine.device_count = kDevices;
  machine.memory_bytes = kMiB;
  machine.seed = seed;
  machine.protect_host_pages = pick(4) == 0;
  machine.schedule =
      std::vector{EffectSchedule::kEarly, EffectSchedule::kLate, EffectSchedule::kRandom}[pick(3)];
  machine.reuse = pick(2) == 0 ? ReuseMode::kImmediate : ReuseMode::kQuarantine;
  scenario.engine.max_chunk_bytes =
      std::vector<uint64_t>{256, 2 * kKiB, 8 * kKiB, 128 * kMiB}[pick(4)];
  scenario.engine.drain_timeout = kPatience;
  scenario.engine.transient_retries = pick(2) == 0 ? 0 : 2;

  FaultPlan& faults = machine.faults;
  for (uint64_t i = pick(8); i > 0; --i) {
    // Some faults come in a row, so that retries do not help.
    const uint64_t first = 20 + pick(2500);
    const uint64_t last = first + (pick(3) == 0 ? pick(5) : 0);
    for (uint64_t at = first; at <= last; ++at) faults.calls.push_back({DeviceCall::kAny, at});
    scenario.may_lose_device = true;
  }
  for (uint64_t i = pick(8); i > 0; --i) {
    faults.stalls.push_back({1 + pick(150), static_cast<double>(pick(2'000)) * 0.01});
  }
  switch (pick(8)) {
    case 0:
      faults.calls.push_back({DeviceCall::kAny, 20 + pick(2500), /*sticky=*/true});
      scenario.may_lose_device = true;
      break;
    case 1:
      faults.stalls.push_back({1 + pick(100), std::numeric_limits<double>::infinity()});
      scenario.may_be_stuck = true;
      break;
    case 2:
      scenario.stuck_kernel_at = static_cast<int>(pick(kOperations));
      scenario.may_be_stuck = true;
      break;
    default:
      break;
  }
  return scenario;
}

struct Use {
  int device = 0;
  Transfer transfer;
  bool writes = false;
};

struct Tensor {
  int device = 0;
  uint8_t* data = nullptr;
  int stream = 0;               // current user of the tensor
  Bytes bytes;                  // expected value
  std::vector<Transfer> reads;  // copies out that `stream` has not waited for
  std::vector<Transfer> writes;
};

struct HostCopy {
  std::shared_ptr<HostBuffer> buffer;
  Bytes bytes;  // expected value
  std::vector<Use> uses;
  int device = 0;           // only user, if devices share no host copies
  bool lost_copy = false;   // a failed batch may copy it forever
  bool lost_write = false;  // and write to it
};

bool IsInjectedForTheMoment(const absl::Status& status) {
  return absl::StrContains(status.message(), "injected, transient") && !absl::IsInternal(status);
}

// Repeats `call` while injected transient faults make it fail.
template <typename Call>
auto Persist(const Call& call) {
  auto result = call();
  for (int i = 0; i < 50 && IsInjectedForTheMoment(StatusOf(result)); ++i) result = call();
  return result;
}

class Simulation {
 public:
  Simulation(Scenario scenario, Random& random)
      : scenario_(std::move(scenario)),
        random_(random),
        world_(scenario_.machine, scenario_.engine) {
    for (int device = 0; device < kDevices; ++device) {
      streams_[device][0] = world_.compute(device);
      for (int i = 1; i < kStreams; ++i) streams_[device][i] = world_.NewStream(device);
    }
  }

  SimulationResult Run() {
    for (int i = 0; i < 6; ++i) NewTensor();
    for (int i = 0; i < 4; ++i) NewHostCopy();
    for (int i = 0; i < kOperations && Goes(); ++i) {
      if (i == scenario_.stuck_kernel_at) LaunchSlow(kStuckFlops);
      NoticeFailedDevices();
      Step();
      ++result_.operations;
      CheckStats();
    }
    End();
    for (const std::string& race : world_.machine().races()) Fail(race);
    return result_;
  }

 private:
  uint64_t Pick(uint64_t count) { return random_() % count; }
  StreamHandle StreamOf(const Tensor& tensor) { return streams_[tensor.device][tensor.stream]; }
  bool Goes() const { return result_.failure.empty() && !(lost_[0] && lost_[1]); }
  void Fail(const std::string& what) {
    if (result_.failure.empty()) {
      result_.failure = absl::StrCat("operation ", result_.operations, ": ", what);
    }
  }
  void Expect(bool claim, const std::string& what) {
    if (!claim) Fail(what);
  }

  void Step() {
    if (tensors_.empty()) return NewTensor();
    if (hosts_.empty()) return NewHostCopy();
    switch (Pick(14)) {
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
        CheckTensor(tensors_[Pick(tensors_.size())]);
        return;
      case 6:
        CheckHostCopy(hosts_[Pick(hosts_.size())]);
        return;
      case 7:
        UseOnStream(tensors_[Pick(tensors_.size())], Pick(kStreams));
        return;
      case 8:
        return world_.engine(AnyDevice()).Poll();
      case 9:
        return LaunchSlow(kSlowFlops * static_cast<double>(1 + Pick(3)) / 3);
      default:
        return Transfers(Pick(2) == 0 ? CopyDirection::kDeviceToHost
                                      : CopyDirection::kHostToDevice);
    }
  }

  int AnyDevice() {
    const int device = static_cast<int>(Pick(kDevices));
    return lost_[device] ? 1 - device : device;
  }

  // --- Calls that return false if the device is lost ---

  bool Holds(int device, const absl::Status& status) {
    if (!status.ok()) Lose(device, status);
    return status.ok();
  }

  // Polling may detect a failure, but cannot return it.
  void NoticeFailedDevices() {
    for (int device = 0; device < kDevices; ++device) {
      if (!lost_[device]) Holds(device, world_.engine(device).health());
    }
  }

  void Lose(int device, const absl::Status& status) {
    const std::string text = status.ToString();
    const bool failed = absl::IsInternal(status) && absl::StrContains(text, "injected");
    const bool stuck = absl::IsDeadlineExceeded(status) ||
                       absl::StrContains(text, "neither finished nor taken") ||
                       (absl::IsUnavailable(status) && absl::StrContains(text, "can never run"));
    Expect((failed && scenario_.may_lose_device) || (stuck && scenario_.may_be_stuck),
           "an error that nothing explains: " + text);
    Expect(absl::StrContains(text, "emu:" + std::to_string(device)),
           "an error that does not name its device: " + text);
    (failed ? result_.lost_device : result_.stuck_device) = true;
    lost_[device] = true;
    EndEngine(device);
    std::erase_if(tensors_, [device](const Tensor& tensor) { return tensor.device == device; });
    std::erase_if(hosts_, [&](const HostCopy& host) { return IsLost(host, device); });
  }

  // Shutdown must not exceed its deadline, and later calls must be refused.
  void EndEngine(int device) {
    TransferEngine& engine = world_.engine(device);
    const double before_ms = world_.machine().now_ms();
    const absl::Status ended = Persist([&] { return engine.Shutdown(absl::Seconds(1)); });
    Expect(
        ended.ok() || absl::IsInternal(ended) ||
            (absl::IsDeadlineExceeded(ended) && absl::StrContains(ended.message(), "submission")),
        "Shutdown: " + ended.ToString());
    // The deadline is in host time, which hardly advances compared with virtual time.
    Expect(world_.machine().now_ms() - before_ms < 2'500, "Shutdown outlasted its deadline");
    const absl::Status refused = engine.Mark(world_.compute(device)).status();
    Expect(absl::IsFailedPrecondition(refused) || absl::IsInternal(refused),
           "after Shutdown: " + refused.ToString());
  }

  // Returns whether the host copy is lost with the device. Bytes that had arrived must be intact.
  bool IsLost(const HostCopy& host, int device) {
    bool under_copy = host.lost_copy;
    bool arrived = !host.lost_write;
    for (const Use& use : host.uses) {
      if (use.transfer.IsDone()) continue;
      under_copy |= use.device == device;
      arrived &= !use.writes;
    }
    if (!under_copy && (share_hosts_ || host.device != device)) return false;
    if (arrived) Expect(world_.ReadHost(*host.buffer) == host.bytes, "host data was lost");
    if (under_copy) {
      lost_ranges_.push_back(
          {static_cast<const uint8_t*>(host.buffer->data()), host.buffer->size_bytes()});
    }
    return true;
  }

  // --- Tensors ---

  absl::Status Access(int device, StreamHandle stream, uint8_t* data, Bytes& bytes, bool write) {
    PINION_RETURN_IF_ERROR(Persist([&] { return world_.machine().PrepareKernel(device, stream); }));
    Kernel kernel;
    kernel.name = write ? "write" : "read";
    (write ? kernel.writes : kernel.reads) = {{data, bytes.size()}};
    std::memcpy(write ? data : bytes.data(), write ? bytes.data() : data, bytes.size());
    return world_.machine().Launch(device, stream, kernel);
  }

  void NewTensor() {
    Tensor tensor;
    tensor.device = AnyDevice();
    tensor.bytes = Pattern(++patterns_, 1 + Pick(kMaxSize));
    const absl::StatusOr<void*> data = Persist([&] {
      return world_.machine()
          .device(tensor.device)
          ->Allocate(tensor.bytes.size(), StreamOf(tensor));
    });
    if (!Holds(tensor.device, data.status())) return;
    tensor.data = static_cast<uint8_t*>(*data);
    if (!Holds(tensor.device,
               Access(tensor.device, StreamOf(tensor), tensor.data, tensor.bytes, true))) {
      return;
    }
    tensors_.push_back(std::move(tensor));
  }

  void FreeTensor(size_t index) {
    Tensor& tensor = tensors_[index];
    if (!CheckTensor(tensor) || !UseOnStream(tensor, 0)) return;
    const absl::Status freed =
        world_.machine().device(tensor.device)->Free(tensor.data, StreamOf(tensor));
    if (Holds(tensor.device, freed)) tensors_.erase(tensors_.begin() + index);
  }

  bool WaitFor(Tensor& tensor, std::vector<Transfer>& transfers, const WaitSite& site) {
    for (const Transfer& transfer : transfers) {
      const absl::Status waited = Persist([&] { return transfer.WaitOn(StreamOf(tensor), site); });
      if (!Holds(tensor.device, waited)) return false;
    }
    transfers.clear();
    return true;
  }
  bool WaitForReads(Tensor& tensor) { return WaitFor(tensor, tensor.reads, kReuseAfterCopyOut); }
  bool WaitForWrites(Tensor& tensor) { return WaitFor(tensor, tensor.writes, kReadAfterCopyIn); }

  // Hands the tensor to another stream of its device.
  bool UseOnStream(Tensor& tensor, int stream) {
    if (!WaitForReads(tensor) || !WaitForWrites(tensor)) return false;
    const absl::Status ordered = Persist([&] {
      return world_.engine(tensor.device)
          .OrderStreams(StreamOf(tensor), streams_[tensor.device][stream], kAfterOtherStream);
    });
    if (!Holds(tensor.device, ordered)) return false;
    tensor.stream = stream;
    return true;
  }

  void WriteTensor(Tensor& tensor) {
    if (!WaitForReads(tensor) || !WaitForWrites(tensor)) return;
    tensor.bytes = Pattern(++patterns_, tensor.bytes.size());
    const int device = tensor.device;
    const StreamHandle stream = StreamOf(tensor);
    if (!Holds(device, Access(device, stream, tensor.data, tensor.bytes, true)) || Pick(4) != 0) {
      return;
    }
    const absl::StatusOr<FenceTicket> mark =
        Persist([&] { return world_.engine(device).Mark(stream); });
    if (!Holds(device, mark.status()) || Pick(2) != 0) return;
    const absl::Status waited =
        Persist([&] { return mark->timeline->Wait(mark->value, kPatience); });
    if (Holds(device, waited)) Expect(mark->IsDone(), "a mark that was waited for is not done");
  }

  // Reads the tensor into `bytes` on its stream.
  bool ReadTensor(Tensor& tensor, Bytes& bytes) {
    bytes.resize(tensor.bytes.size());
    return WaitForWrites(tensor) &&
           Holds(tensor.device, Access(tensor.device, StreamOf(tensor), tensor.data, bytes, false));
  }

  bool CheckTensor(Tensor& tensor) {
    Bytes bytes;
    if (!ReadTensor(tensor, bytes)) return false;
    Expect(bytes == tensor.bytes, "wrong bytes in a tensor");
    return true;
  }

  void LaunchSlow(double flops) {
    const int device = AnyDevice();
    const StreamHandle stream = streams_[device][Pick(kStreams)];
    if (!Holds(device, Persist([&] { return world_.machine().PrepareKernel(device, stream); }))) {
      return;
    }
    Kernel kernel;
    kernel.name = "slow";
    kernel.flops = flops;
    Holds(device, world_.machine().Launch(device, stream, kernel));
  }

  // --- Host copies ---

  void NewHostCopy() {
    const uint64_t size_bytes = 1 + Pick(2 * kMaxSize);
    absl::StatusOr<PinnedBlock> block =
        Persist([&] { return world_.allocator().Allocate(size_bytes); });
    if (!block.ok()) {
      // Pinned memory belongs to device 0.
      Expect(scenario_.may_lose_device || scenario_.may_be_stuck, block.status().ToString());
      return;
    }
    HostCopy host;
    host.device = AnyDevice();
    host.buffer = std::make_shared<HostBuffer>(*std::move(block));
    host.bytes = Pattern(++patterns_, size_bytes);
    const auto* begin = static_cast<const uint8_t*>(host.buffer->data());
    for (const auto& [lost, lost_bytes] : lost_ranges_) {
      Expect(begin + size_bytes <= lost || lost + lost_bytes <= begin,
             "a block that may be under copy was reused");
    }
    // A block is reused only after all of its copies, so the host may write to it at once.
    world_.WriteHost(*host.buffer, host.bytes);
    hosts_.push_back(std::move(host));
  }

  void DropHostCopy(size_t index) {
    if (Pick(2) == 0 && !CheckHostCopy(hosts_[index])) return;
    hosts_.erase(hosts_.begin() + index);
  }

  bool WaitForUses(HostCopy& host) {
    for (const Use& use : host.uses) {
      const absl::Status waited = Persist([&] { return use.transfer.Wait(kPatience); });
      if (!Holds(use.device, waited)) return false;
    }
    host.uses.clear();
    for (const FenceTicket& ticket : host.buffer->tickets()) {
      Expect(ticket.IsDone(), "a ticket that no transfer stands for");
    }
    return true;
  }

  bool CheckHostCopy(HostCopy& host) {
    if (!WaitForUses(host)) return false;
    Expect(world_.ReadHost(*host.buffer) == host.bytes, "wrong bytes in host memory");
    return true;
  }

  // --- Transfers ---

  // Copies some tensors of one stream in one batch, each in pieces to or from its own host buffer.
  void Transfers(CopyDirection direction) {
    const bool out = direction == CopyDirection::kDeviceToHost;
    const size_t first = Pick(tensors_.size());
    const int device = tensors_[first].device;
    const int stream = tensors_[first].stream;
    std::vector<size_t> hosts;
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (share_hosts_ || hosts_[i].device == device) hosts.push_back(i);
    }
    std::shuffle(hosts.begin(), hosts.end(), random_);
    const size_t most = 1 + Pick(3);

    CopyBatch batch(direction);
    std::vector<std::pair<size_t, size_t>> moved;  // tensor, host copy
    std::vector<Bytes> results;                    // values of the destinations on success
    for (size_t i = 0; i < tensors_.size() && moved.size() < most && !hosts.empty(); ++i) {
      const size_t index = (first + i) % tensors_.size();
      Tensor& tensor = tensors_[index];
      if (tensor.device != device || tensor.stream != stream) continue;
      if ((!out && !WaitForReads(tensor)) || !WaitForWrites(tensor)) return;
      results.push_back(AddPieces(tensor, hosts_[hosts.back()], batch));
      moved.emplace_back(index, hosts.back());
      hosts.pop_back();
    }
    if (batch.empty()) return;
    const absl::StatusOr<Transfer> transfer =
        world_.engine(device).Submit(std::move(batch), streams_[device][stream]);
    if (!transfer.ok() && IsInjectedForTheMoment(transfer.status())) {
      return TakeInFailedBatch(out, moved, results);
    }
    if (absl::IsInternal(transfer.status())) {
      for (const auto& [tensor, host] : moved) NoteLostCopy(hosts_[host], out);
    }
    if (!Holds(device, transfer.status())) return;
    for (size_t i = 0; i < moved.size(); ++i) {
      Tensor& tensor = tensors_[moved[i].first];
      HostCopy& host = hosts_[moved[i].second];
      (out ? host.bytes : tensor.bytes) = std::move(results[i]);
      (out ? tensor.reads : tensor.writes).push_back(*transfer);
      host.uses.push_back({device, *transfer, out});
    }
  }

  // Chunks of a batch that failed permanently have tickets that no transfer represents.
  void NoteLostCopy(HostCopy& host, bool writes) {
    for (const FenceTicket& ticket : host.buffer->tickets()) {
      const bool known = std::any_of(host.uses.begin(), host.uses.end(), [&](const Use& use) {
        return use.transfer.ticket().timeline == ticket.timeline &&
               use.transfer.ticket().value == ticket.value;
      });
      if (known || ticket.IsDone()) continue;
      host.lost_copy = true;
      host.lost_write |= writes;
    }
  }

  // Adds a random range in a few shuffled pieces, at different offsets of both sides. Returns the
  // expected destination.
  Bytes AddPieces(const Tensor& tensor, const HostCopy& host, CopyBatch& batch) {
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
    const bool out = batch.direction() == CopyDirection::kDeviceToHost;
    Bytes result = out ? host.bytes : tensor.bytes;
    const Bytes& source = out ? tensor.bytes : host.bytes;
    std::copy_n(source.begin() + (out ? tensor_begin : host_begin), size_bytes,
                result.begin() + (out ? host_begin : tensor_begin));
    return result;
  }

  // After an error nothing of the batch may be written. Each byte is the old one or the new one,
  // and must not change again.
  void TakeInFailedBatch(bool out, const std::vector<std::pair<size_t, size_t>>& moved,
                         const std::vector<Bytes>& results) {
    for (size_t i = 0; i < moved.size(); ++i) {
      Bytes now;
      Bytes* model = nullptr;
      if (out) {
        HostCopy& host = hosts_[moved[i].second];
        if (!WaitForUses(host)) return;
        now = world_.ReadHost(*host.buffer);
        model = &host.bytes;
      } else {
        Tensor& tensor = tensors_[moved[i].first];
        if (!ReadTensor(tensor, now)) return;
        model = &tensor.bytes;
      }
      for (size_t byte = 0; byte < now.size(); ++byte) {
        Expect(now[byte] == (*model)[byte] || now[byte] == results[i][byte],
               "a failed batch has left a byte that is neither the old nor the new one");
      }
      *model = std::move(now);
    }
  }

  // --- Ends ---

  void CheckStats() {
    for (int device = 0; device < kDevices; ++device) {
      const EngineStats stats = world_.engine(device).GetStats();
      for (const DirectionStats& direction : {stats.h2d, stats.d2h}) {
        Expect(direction.submitted_bytes == direction.completed_bytes + direction.in_flight_bytes,
               "the bytes of the stats do not add up");
      }
    }
  }

  void End() {
    while (!tensors_.empty() && Goes()) FreeTensor(0);
    while (!hosts_.empty() && Goes()) {
      if (CheckHostCopy(hosts_[0])) hosts_.erase(hosts_.begin());
    }
    for (int device = 0; device < kDevices && result_.failure.empty(); ++device) {
      if (!lost_[device] &&
          Holds(device, Persist([&] { return world_.engine(device).Drain(kPatience); }))) {
        const EngineStats stats = world_.engine(device).GetStats();
        Expect(stats.h2d.in_flight_bytes + stats.d2h.in_flight_bytes == 0,
               "drained, but in flight");
        Expect(world_.machine().memory_stats(device).in_use_bytes == 0, "device memory has leaked");
      }
    }
    hosts_.clear();
    if (result_.failure.empty() && !lost_[0] && !lost_[1]) {
      Expect(world_.allocator().Trim(0).ok(), "Trim");
      Expect(world_.allocator().GetStats().locked_bytes.current == 0, "pinned memory has leaked");
      Expect(CheckInvariants(world_.allocator().GetStats()).ok(), "the allocator's invariants");
    }
    for (int device = 0; device < kDevices; ++device) {
      const EngineStats stats = world_.engine(device).GetStats();
      result_.retries += stats.transient_retries;
      for (const DirectionStats& direction : {stats.h2d, stats.d2h}) {
        result_.transfers += direction.submitted_transfers;
        result_.chunks += direction.submitted_chunks;
        result_.failed_submits += direction.failed_submits;
      }
    }
  }

  const Scenario scenario_;
  // A stuck copy of a shared host buffer would block the other device too.
  const bool share_hosts_ = !scenario_.may_be_stuck;
  Random& random_;
  EngineWorld world_;
  StreamHandle streams_[kDevices][kStreams];
  bool lost_[kDevices] = {};
  std::vector<Tensor> tensors_;
  std::vector<HostCopy> hosts_;
  std::vector<std::pair<const uint8_t*, uint64_t>> lost_ranges_;
  uint64_t patterns_ = 0;
  SimulationResult result_;
};

// Lost devices log many errors.
class SilentLog {
 public:
  SilentLog() : previous_(SetLogSink([](LogSeverity, const std::string&) {})) {}
  ~SilentLog() { SetLogSink(previous_); }

 private:
  LogSink previous_;
};

}  // namespace

SimulationResult SimulateEngine(uint64_t seed) {
  const SilentLog silent;
  Random random(seed);
  SimulationResult total;
  while (total.failure.empty() && total.operations < kLeastOperations) {
    Scenario scenario = DrawScenario(seed, random);
    const SimulationResult world = Simulation(std::move(scenario), random).Run();
    total.failure = world.failure;
    total.operations += world.operations;
    total.transfers += world.transfers;
    total.chunks += world.chunks;
    total.retries += world.retries;
    total.failed_submits += world.failed_submits;
    total.lost_device |= world.lost_device;
    total.stuck_device |= world.stuck_device;
  }
  return total;
}

}  // namespace pinion::testing
