// Copies many small pieces as one: gathered on the device on the way out; one fetch with views on
// the way in.
//
// LibTorch's current stream must be the world's compute stream. Throws LibTorch's errors.
//
// Thread safety: none.
// Ownership: borrows the world.

#ifndef PINION_BENCH_PACKED_COPY_H_
#define PINION_BENCH_PACKED_COPY_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/statusor.h"
#include "pinion/bench/copy_method.h"
#include "pinion/bench/copy_world.h"
#include "pinion/bench/engine_cases.h"

namespace pinion {

// `of` has one direction.
absl::StatusOr<std::unique_ptr<CopyMethod>> NewPackedCopies(CopyWorld& world, c10::Device device,
                                                            const BenchCase& of);

}  // namespace pinion

#endif  // PINION_BENCH_PACKED_COPY_H_
