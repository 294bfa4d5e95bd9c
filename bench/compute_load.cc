#include "pinion/bench/compute_load.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

constexpr int64_t kWarmUpProducts = 16;

}  // namespace

absl::StatusOr<std::unique_ptr<ComputeLoad>> ComputeLoad::Create(CopyWorld& world,
                                                                 c10::Device device,
                                                                 int64_t width) {
  const auto options = at::device(device).dtype(at::kFloat);
  PINION_ASSIGN_OR_RETURN(const EventHandle start, world.device().CreateTimedEvent());
  PINION_ASSIGN_OR_RETURN(const EventHandle end, world.device().CreateTimedEvent());
  std::unique_ptr<ComputeLoad> load(new ComputeLoad(
      world, start, end, at::rand({width, width}, options), at::empty({width, width}, options)));
  PINION_RETURN_IF_ERROR(load->TimeAlone(kWarmUpProducts).status());
  PINION_ASSIGN_OR_RETURN(const double ms, load->TimeAlone(kWarmUpProducts));
  load->product_ms_ = ms / kWarmUpProducts;
  return load;
}

ComputeLoad::~ComputeLoad() {
  for (const EventHandle event : {start_, end_}) {
    if (absl::Status destroyed = world_.device().DestroyEvent(event); !destroyed.ok()) {
      PINION_LOG(kWarning) << "an event was leaked: " << destroyed.message();
    }
  }
}

int64_t ComputeLoad::ProductsFor(double ms) const {
  return std::max<int64_t>(1, std::llround(ms / product_ms_));
}

void ComputeLoad::Enqueue(int64_t products) {
  for (int64_t i = 0; i < products; ++i) at::mm_out(product_, factor_, factor_);
}

absl::StatusOr<double> ComputeLoad::ElapsedMs() {
  PINION_RETURN_IF_ERROR(world_.device().SynchronizeStream(world_.compute()));
  return world_.device().ElapsedMs(start_, end_);
}

absl::StatusOr<double> ComputeLoad::TimeAlone(int64_t products) {
  PINION_RETURN_IF_ERROR(world_.SynchronizeAll());
  PINION_RETURN_IF_ERROR(world_.device().RecordEvent(start_, world_.compute()));
  Enqueue(products);
  PINION_RETURN_IF_ERROR(world_.device().RecordEvent(end_, world_.compute()));
  return ElapsedMs();
}

absl::StatusOr<BenchTime> ComputeLoad::TimeCopies(CopyMethod& method, const BenchCase& of,
                                                  int64_t products) {
  BenchTime time;
  PINION_ASSIGN_OR_RETURN(time.compute_alone_ms,
                          TimeAlone(products * static_cast<int64_t>(of.transfers)));
  const double start_ms = world_.now_ms();
  if (of.setting == BenchSetting::kAfterCompute) {
    PINION_RETURN_IF_ERROR(world_.device().RecordEvent(start_, world_.compute()));
    for (uint64_t i = 0; i < of.transfers; ++i) {
      Enqueue(products);
      PINION_RETURN_IF_ERROR(method.Submit(world_.compute()));
    }
  } else {
    for (uint64_t i = 0; i < of.transfers; ++i) {
      PINION_RETURN_IF_ERROR(method.Submit(world_.idle()));
    }
    // Recorded here, so that the products' time excludes the host's submissions.
    PINION_RETURN_IF_ERROR(world_.device().RecordEvent(start_, world_.compute()));
    Enqueue(products * static_cast<int64_t>(of.transfers));
  }
  PINION_RETURN_IF_ERROR(world_.device().RecordEvent(end_, world_.compute()));
  time.host_ms = world_.now_ms() - start_ms;
  PINION_RETURN_IF_ERROR(method.Wait());
  time.ms = world_.now_ms() - start_ms;
  PINION_ASSIGN_OR_RETURN(time.compute_ms, ElapsedMs());
  return time;
}

}  // namespace pinion
