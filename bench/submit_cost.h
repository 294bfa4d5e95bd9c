// What TransferEngine::Submit costs the host, in wall time, on a device that does nothing.
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
  // `of` is one way.
  static absl::StatusOr<std::unique_ptr<SubmitCost>> Create(const BenchCase& of);

  // The median of some that follow each other closely. Their batches are built before.
  absl::StatusOr<BenchTime> Run();

 private:
  SubmitCost() = default;

  CopyDirection direction_ = CopyDirection::kDeviceToHost;
  uint64_t piece_bytes_ = 0;
  std::vector<char*> device_pieces_;  // of one batch, in the order of the host's
  std::unique_ptr<CopyWorld> world_;
  std::shared_ptr<void> device_memory_;
  std::vector<std::shared_ptr<HostBuffer>> hosts_;  // of one batch each
};

}  // namespace pinion

#endif  // PINION_BENCH_SUBMIT_COST_H_
