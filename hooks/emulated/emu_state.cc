#include "pinion/hooks/emulated/emu_state.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion::emu {
namespace {

constexpr c10::StreamId kDefaultStream = 0;
constexpr uint64_t kPooledStreams = 32;

// Never destroyed: tensors and threads may outlive main().
struct State {
  std::shared_ptr<EmulatedMachine> machine;
  std::vector<std::shared_ptr<Device>> devices;
  std::atomic<uint64_t> generation;  // of the machine
  std::atomic<uint64_t> next_pooled;

  Mutex mu;
  std::map<std::pair<int, c10::StreamId>, StreamHandle> streams ABSL_GUARDED_BY(mu);
};

State& GlobalState() {
  static State* const state = new State;
  return *state;
}

struct ThreadState {
  uint64_t generation;
  c10::DeviceIndex device;
  std::array<c10::StreamId, kMaxDevices> streams;
};

ThreadState& ThisThread() {
  thread_local ThreadState thread = {};
  const uint64_t generation = GlobalState().generation.load(std::memory_order_acquire);
  if (thread.generation != generation)
    thread = {.generation = generation, .device = {}, .streams = {}};
  return thread;
}

void CheckIndex(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < DeviceCount(),
              "there is no device emu:", static_cast<int>(index), ": the emulated machine has ",
              DeviceCount(), " devices (EmulatedOptions::device_count)");
}

c10::StreamId& CurrentId(c10::DeviceIndex index) {
  CheckIndex(index);
  return ThisThread().streams.at(index);
}

c10::Stream MakeStream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmu, index), id);
}

}  // namespace

void InstallMachine(std::shared_ptr<EmulatedMachine> machine) {
  State& state = GlobalState();
  std::vector<std::shared_ptr<Device>> devices;
  for (int index = 0; index < machine->device_count(); ++index) {
    devices.push_back(machine->device(index));
  }
  state.devices = std::move(devices);
  {
    const MutexLock lock(state.mu);
    state.streams.clear();
  }
  state.machine = std::move(machine);
  state.generation.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<EmulatedMachine> InstalledMachine() { return GlobalState().machine; }

// LibTorch cannot call before the device type is registered, which needs a machine.
EmulatedMachine& Machine() { return *GlobalState().machine; }

int DeviceCount() noexcept { return static_cast<int>(GlobalState().devices.size()); }

Device& DeviceAt(c10::DeviceIndex index) { return *SharedDeviceAt(index); }

std::shared_ptr<Device> SharedDeviceAt(c10::DeviceIndex index) {
  CheckIndex(index);
  return GlobalState().devices[index];
}

c10::DeviceIndex CurrentDevice() { return ThisThread().device; }

c10::DeviceIndex ExchangeDevice(c10::DeviceIndex index) {
  ThreadState& thread = ThisThread();
  const c10::DeviceIndex before = thread.device;
  if (index >= 0) {
    CheckIndex(index);
    thread.device = index;
  }
  return before;
}

c10::DeviceIndex IndexOf(c10::Device device) {
  TORCH_CHECK(device.type() == kEmu, "expected an emu device, not ", device);
  const c10::DeviceIndex index = device.has_index() ? device.index() : CurrentDevice();
  CheckIndex(index);
  return index;
}

c10::Stream CurrentStream(c10::DeviceIndex index) { return MakeStream(index, CurrentId(index)); }

c10::Stream ExchangeStream(const c10::Stream& stream) {
  const c10::DeviceIndex index = stream.device_index();
  return MakeStream(index, std::exchange(CurrentId(index), stream.id()));
}

c10::Stream PooledStream(c10::DeviceIndex index) {
  const uint64_t turn = GlobalState().next_pooled.fetch_add(1, std::memory_order_relaxed);
  return MakeStream(index, static_cast<c10::StreamId>(turn % kPooledStreams) + 1);
}

StreamHandle HandleOf(const c10::Stream& stream) {
  const c10::DeviceIndex index = stream.device_index();
  CheckIndex(index);
  if (stream.id() == kDefaultStream) return Machine().default_stream(index);
  State& state = GlobalState();
  const std::pair<int, c10::StreamId> key(index, stream.id());
  {
    const MutexLock lock(state.mu);
    const auto found = state.streams.find(key);
    if (found != state.streams.end()) return found->second;
  }
  const absl::StatusOr<StreamHandle> created =
      DeviceAt(index).CreateStream("stream " + std::to_string(stream.id()));
  ThrowIfError(created.status(), "creating a stream");
  // If another thread was faster, this thread's stream stays unused.
  const MutexLock lock(state.mu);
  return state.streams.emplace(key, *created).first->second;
}

StreamHandle CurrentHandle(c10::DeviceIndex index) { return HandleOf(CurrentStream(index)); }

}  // namespace pinion::emu
