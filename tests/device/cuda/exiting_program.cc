// Ends with exit code 3 while copies are in flight; exit_code_test runs it.
//
//   exiting_program global|local|leaked main|thread|busy|pinning
//
// The first argument says what holds the allocator, the engine and their memory: a global, a static
// of a function, or an object that is never destroyed. The second one says who ends the process.
// Either main returns, or another thread calls exit. With `busy` or `pinning`, main returns while
// another thread submits copies, or pins and unpins memory.
//
// Exit code 4: a call began after the runtime was unloaded. Exit code 5: the runtime was called
// while globals were destroyed.

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeCuda;
using ::pinion::testing::FakeHost;

FakeCuda* runtime = nullptr;  // never destroyed
std::atomic<uint64_t> calls_before_exit{0};
bool calls_during_exit_allowed = true;
// Loop iterations of a thread that may be inside the runtime while it is unloaded.
bool has_busy_thread = false;
std::atomic<uint64_t> rounds{0};

void WaitForRounds(uint64_t count) {
  for (const uint64_t before = rounds; rounds < before + count;) usleep(100);
}

// The program's first static object, so the last one to be destroyed.
struct Judge {
  ~Judge() {
    if (runtime == nullptr) return;
    uint64_t calls_allowed = 0;
    if (has_busy_thread) {
      // The iteration under way may still make calls. Later iterations must make none.
      WaitForRounds(2);
      calls_allowed = runtime->calls_after_unload();
      WaitForRounds(3);
    }
    if (runtime->calls_after_unload() > calls_allowed) _exit(4);
    if (!calls_during_exit_allowed && runtime->all_calls() > calls_before_exit) _exit(5);
  }
} judge;

struct World {
  World() {
    AllocatorOptions options;
    options.segment_bytes = 4 * kMiB;
    allocator =
        PinnedAllocator::Create(options, device->pinned_source(), FakeHost().Probe()).value();
    engine = TransferEngine::Create({}, device).value();
    compute = device->CreateStream("compute").value();
    data = static_cast<uint8_t*>(device->Allocate(2 * kMiB, compute).value());
    block = allocator->Allocate(kMiB).value();
  }

  // Submits a copy in each direction, with separate memory.
  void Submit() {
    for (const CopyDirection direction :
         {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
      absl::StatusOr<PinnedBlock> host = allocator->Allocate(kMiB);
      if (!host.ok()) return;
      CopyBatch batch(direction);
      uint8_t* const mine = direction == CopyDirection::kDeviceToHost ? data : data + kMiB;
      batch.Add(std::make_shared<HostBuffer>(*std::move(host)), 0, mine, kMiB);
      absl::StatusOr<Transfer> transfer = engine->Submit(std::move(batch), compute);
      if (transfer.ok()) transfers.push_back(*std::move(transfer));
    }
  }

  // Allocates a block that fits no segment, and returns the memory.
  void Pin() {
    if (!allocator->Allocate(8 * kMiB).ok()) return;
    allocator->Trim(0).IgnoreError();
  }

  const std::shared_ptr<Device> device = std::make_shared<CudaDevice>(FakeCuda::Api(), 0);
  std::shared_ptr<PinnedAllocator> allocator;
  std::shared_ptr<TransferEngine> engine;
  StreamHandle compute;
  uint8_t* data = nullptr;
  PinnedBlock block;
  std::vector<Transfer> transfers;
};

std::unique_ptr<World> global_world;

World& HeldBy(const std::string& holder) {
  if (holder == "local") {
    static World world;
    return world;
  }
  if (holder == "global") return *(global_world = std::make_unique<World>());
  static World* const never_destroyed = new World;
  return *never_destroyed;
}

int Run(const std::string& holder, const std::string& ender) {
  runtime = new FakeCuda(EmulatedOptions());
  // The runtime is loaded before its users, so it is unloaded after static objects made later.
  std::atexit([] { runtime->Unload(); });
  World& world = HeldBy(holder);
  world.Submit();
  if (ender == "busy" || ender == "pinning") {
    has_busy_thread = true;
    std::thread([&world, pins = ender == "pinning"] {
      for (;; ++rounds) {
        if (pins) {
          world.Pin();
        } else {
          world.Submit();
          world.transfers.clear();
        }
      }
    }).detach();
    usleep(10'000);
    return 3;
  }
  // A static of a function is destroyed while the runtime is still loaded.
  calls_during_exit_allowed = holder == "local";
  calls_before_exit = runtime->all_calls();
  if (ender == "main") return 3;
  std::thread([] { std::exit(3); }).detach();
  while (true) pause();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) { return argc == 3 ? pinion::Run(argv[1], argv[2]) : 2; }
