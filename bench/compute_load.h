// Computes beside copies: products of square float32 matrices, one after another.
//
// LibTorch's current stream must be the world's compute stream. Throws LibTorch's errors.
//
// Thread safety: none.
// Ownership: borrows the world.

#ifndef PINION_BENCH_COMPUTE_LOAD_H_
#define PINION_BENCH_COMPUTE_LOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "pinion/bench/copy_method.h"
#include "pinion/bench/copy_world.h"
#include "pinion/bench/engine_cases.h"
#include "pinion/device/device.h"

namespace pinion {

class ComputeLoad {
 public:
  // `width` is the matrices' size.
  static absl::StatusOr<std::unique_ptr<ComputeLoad>> Create(CopyWorld& world, c10::Device device,
                                                             int64_t width);
  ~ComputeLoad();
  ComputeLoad(const ComputeLoad&) = delete;
  ComputeLoad& operator=(const ComputeLoad&) = delete;

  // Returns how many products take about `ms`; at least 1.
  int64_t ProductsFor(double ms) const;

  // Runs `products` for each transfer. Measures the products alone first.
  absl::StatusOr<BenchTime> TimeCopies(CopyMethod& method, const BenchCase& of, int64_t products);

 private:
  ComputeLoad(CopyWorld& world, EventHandle start, EventHandle end, at::Tensor factor,
              at::Tensor product)
      : world_(world), start_(start), end_(end), factor_(factor), product_(product) {}

  void Enqueue(int64_t products);
  // Returns the time between the two events. Blocks until the compute stream is idle.
  absl::StatusOr<double> ElapsedMs();
  absl::StatusOr<double> TimeAlone(int64_t products);

  CopyWorld& world_;
  const EventHandle start_;
  const EventHandle end_;
  const at::Tensor factor_;
  at::Tensor product_;
  double product_ms_ = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_COMPUTE_LOAD_H_
