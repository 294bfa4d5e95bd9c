// Many small pieces as one copy: gathered on the device on the way out, one fetch and views of it
// on the way in.
//
// LibTorch's current stream must be the world's compute stream. LibTorch's errors are thrown.
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

// `of` is one way.
absl::StatusOr<std::unique_ptr<CopyMethod>> NewPackedCopies(CopyWorld& world, c10::Device device,
                                                            const BenchCase& of);

}  // namespace pinion

#endif  // PINION_BENCH_PACKED_COPY_H_
