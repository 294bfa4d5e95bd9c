// A small transformer of ATen functions, and one training step of it, with and without offload.
//
//   const TestNet net(device, at::kFloat);
//   const Gradients plain = TrainStep(net, nullptr);
//   ExpectSameGradients(plain, TrainStep(net, session));

#ifndef PINION_TESTS_HOOKS_SUPPORT_TEST_NET_H_
#define PINION_TESTS_HOOKS_SUPPORT_TEST_NET_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pinion/hooks/activations/offload_session.h"

namespace pinion::testing {

struct NetShape {
  int64_t layers = 2;
  int64_t batch = 2;
  int64_t tokens = 12;
  int64_t channels = 16;
  int64_t heads = 2;
  int64_t classes = 8;
  double dropout = 0.1;
  uint64_t seed = 1;  // of parameters and input
};

class TestNet {
 public:
  // Equal shapes give equal parameters, input and targets on every device.
  TestNet(c10::Device device, c10::ScalarType dtype, const NetShape& shape = {});

  // Returns the loss; dropout draws from the device's generator.
  at::Tensor Loss() const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  at::Tensor Block(const at::Tensor& x, size_t first_parameter) const;

  NetShape shape_;
  std::vector<at::Tensor> parameters_;
  at::Tensor input_;
  at::Tensor targets_;
};

// A step's results, on the CPU.
struct Gradients {
  at::Tensor loss;
  std::vector<at::Tensor> parameters;
};

// Resets all generators, runs forward (in a scope unless `session` is null) and backward.
Gradients TrainStep(const TestNet& net, const std::shared_ptr<OffloadSession>& session);

// Returns the net's gradients and resets them.
Gradients TakeGradients(const TestNet& net, const at::Tensor& loss);

void SeedGenerators();

// Compares bits.
bool SameBytes(const at::Tensor& a, const at::Tensor& b);
// Compares a device's result with the CPU's: bits on the emulated device,
// torch.testing.assert_close's float32 tolerance on a GPU.
bool AsOnCpu(const at::Tensor& computed, const at::Tensor& on_cpu);
bool SameGradients(const Gradients& a, const Gradients& b);
void ExpectSameGradients(const Gradients& expected, const Gradients& actual);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_TEST_NET_H_
