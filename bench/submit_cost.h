// Measures the wall time of TransferEngine::Submit on a device that does nothing.
//
// Thread safety: none.

#ifndef PINION_BENCH_SUBMIT_COST_H_
#define PINION_BENCH_SUBMIT_COST_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/bench/copy_world.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/engine/host_buffer.h"

namespace pinion {

class SubmitCost {
 public:
  // `of` has one direction.
  static absl::StatusOr<std::unique_ptr<SubmitCost>> Create(const BenchCase& of);

  // Returns the median of calls in close succession. Batches are built before.
  absl::StatusOr<BenchTime> Run();

 private:
  SubmitCost() = default;

  CopyDirection direction_ = CopyDirection::kDeviceToHost;
  uint64_t piece_bytes_ = 0;
  std::vector<char*> device_pieces_;  // of one batch, in the host's order
  std::unique_ptr<CopyWorld> world_;
  std::shared_ptr<void> device_memory_;
  std::vector<std::shared_ptr<HostBuffer>> hosts_;  // one per batch
};

}  // namespace pinion

#endif  // PINION_BENCH_SUBMIT_COST_H_
