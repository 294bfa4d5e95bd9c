// Methods of moving the bytes of lanes: device calls, or the engine.
//
// Thread safety: none.
// Ownership: borrows the world.

#ifndef PINION_BENCH_COPY_METHOD_H_
#define PINION_BENCH_COPY_METHOD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/bench/copy_world.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/device/device.h"

namespace pinion {

class CopyMethod {
 public:
  virtual ~CopyMethod() = default;
  // Enqueues one transfer per lane behind the current work of `after`.
  virtual absl::Status Submit(StreamHandle after) = 0;
  // Blocks until the last byte has arrived.
  virtual absl::Status Wait() = 0;
  virtual absl::Status Verify() = 0;
};

// Returns prepared lanes, each with its own memory.
absl::StatusOr<std::vector<CopyLane>> NewLanes(CopyWorld& world, const BenchCase& of);

// Makes one device call per piece. Orders nothing after world.idle().
absl::StatusOr<std::unique_ptr<CopyMethod>> NewRawCopies(CopyWorld& world,
                                                         std::vector<CopyLane> lanes);

// Makes one TransferEngine::Submit per lane.
absl::StatusOr<std::unique_ptr<CopyMethod>> NewEngineCopies(CopyWorld& world,
                                                            std::vector<CopyLane> lanes);

// Times `transfers` transfers back to back.
absl::StatusOr<BenchTime> TimeCopies(CopyWorld& world, CopyMethod& method, uint64_t transfers);

}  // namespace pinion

#endif  // PINION_BENCH_COPY_METHOD_H_
