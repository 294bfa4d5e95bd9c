// A library that copies with its own engine and leaves nothing behind; dlclose_test loads it.

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"

namespace pinion {
namespace {

int Use() {
  testing::EngineWorld world;
  uint8_t* const data = world.AllocateDevice(kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(kMiB);
  world.WriteDevice(data, testing::Pattern(1, kMiB));
  if (!world.CopyOut(host, data).Wait(absl::Seconds(30)).ok()) return 1;
  if (world.ReadHost(*host) != testing::Pattern(1, kMiB)) return 2;
  world.CopyIn(host, data);  // in flight during destruction
  return 0;
}

}  // namespace
}  // namespace pinion

// Runs on its own thread: per-thread state would otherwise keep the library loaded.
extern "C" int UseTheEngine() {
  int result = -1;
  std::thread([&] { result = pinion::Use(); }).join();
  return result;
}
