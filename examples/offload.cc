// Trains a small model whose activations rest in host memory: bazel run //examples:offload
#include <torch/torch.h>

#include <cstdio>

#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/emulated/emu_device.h"

int main() {
  // An emulated GPU. On a real one take pinion::CudaBackend() and torch::kCUDA in its place.
  const auto machine = pinion::EmulatedMachine::Create({}).value();
  if (!pinion::RegisterEmuDevice(machine).ok()) return 1;
  const auto session = pinion::OffloadSession::Create({}, pinion::EmulatedBackend(machine)).value();
  const torch::Device device("emu:0");

  torch::nn::Sequential model;
  for (int layer = 0; layer < 8; ++layer) {
    model->push_back(torch::nn::Linear(256, 256));
    model->push_back(torch::nn::GELU());
  }
  model->to(device);
  torch::optim::Adam optimizer(model->parameters());
  const torch::Tensor x = torch::randn({512, 256}).to(device);

  for (int step = 0; step < 3; ++step) {
    torch::Tensor loss;
    {
      // What autograd saves in here goes to host memory ...
      const pinion::OffloadScope scope(session, *model);
      loss = (model->forward(x) - x).square().mean();
    }
    loss.backward();  // ... and is back just in time in here.
    optimizer.step();
    optimizer.zero_grad();
    std::printf("step %d: loss %.4f\n", step, loss.item<float>());
  }
  std::printf("%s", session->GetStats().ToString().c_str());
}
