// Runs LibTorch's profiler with memory on the calling thread, until StopCpuProfiler.

#ifndef PINION_TESTS_HOOKS_SUPPORT_CPU_PROFILER_H_
#define PINION_TESTS_HOOKS_SUPPORT_CPU_PROFILER_H_

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>

#include <memory>
#include <set>

namespace pinion::testing {

inline void StartCpuProfiler() {
  using torch::profiler::impl::ProfilerConfig;
  using torch::profiler::impl::ProfilerState;
  const std::set<torch::profiler::impl::ActivityType> activities = {
      torch::profiler::impl::ActivityType::CPU};
  const ProfilerConfig config(ProfilerState::KINETO, /*report_input_shapes=*/false,
                              /*profile_memory=*/true);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

inline std::unique_ptr<torch::autograd::profiler::ProfilerResult> StopCpuProfiler() {
  return torch::autograd::profiler::disableProfiler();
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_CPU_PROFILER_H_
