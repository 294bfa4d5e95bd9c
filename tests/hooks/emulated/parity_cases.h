// Programs of torch::nn that run on the CPU and on the emulated device, to compare the bits.
//
// They are in one file because torch/torch.h takes a minute to compile.

#ifndef PINION_TESTS_HOOKS_EMULATED_PARITY_CASES_H_
#define PINION_TESTS_HOOKS_EMULATED_PARITY_CASES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

namespace pinion {

struct ParityCase {
  std::string name;
  // Seeds, runs on the device with parameters of the dtype, and returns outputs, gradients, and
  // parameters after steps. The tensors may be on any device.
  std::function<std::vector<at::Tensor>(c10::Device, at::ScalarType)> run;
};

std::vector<ParityCase> ParityCases();

}  // namespace pinion

#endif  // PINION_TESTS_HOOKS_EMULATED_PARITY_CASES_H_
