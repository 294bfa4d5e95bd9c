// Computes the gradients of a small model twice, the second time with its activations in host
// memory, and compares them bit by bit. Runs on CUDA if there is a GPU and the program was linked
// for it.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/emulated/emu_device.h"

namespace {

// Offloads if there is a session.
std::vector<torch::Tensor> Gradients(torch::nn::Sequential& model, const torch::Tensor& x,
                                     const std::shared_ptr<pinion::OffloadSession>& session) {
  model->zero_grad();
  torch::Tensor loss;
  {
    std::optional<pinion::OffloadScope> scope;
    if (session != nullptr) scope.emplace(session, *model);
    loss = (model->forward(x) - x).square().mean();
  }
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : model->parameters()) {
    gradients.push_back(parameter.grad().cpu());
  }
  return gradients;
}

}  // namespace

int main() {
  const bool on_gpu = torch::cuda::is_available();
  const auto machine = pinion::EmulatedMachine::Create({}).value();
  if (!on_gpu && !pinion::RegisterEmuDevice(machine).ok()) return 1;
  const pinion::DeviceBackend backend =
      on_gpu ? pinion::CudaBackend() : pinion::EmulatedBackend(machine);
  const auto session = pinion::OffloadSession::Create({}, backend).value();
  const torch::Device device(on_gpu ? "cuda:0" : "emu:0");

  torch::nn::Sequential model;
  for (int layer = 0; layer < 8; ++layer) {
    model->push_back(torch::nn::Linear(256, 256));
    model->push_back(torch::nn::GELU());
  }
  model->to(device);
  const torch::Tensor x = torch::randn({512, 256}).to(device);

  const auto expected = Gradients(model, x, nullptr);
  const auto offloaded = Gradients(model, x, session);
  bool equal = true;
  for (size_t i = 0; i < expected.size(); ++i) equal &= expected[i].equal(offloaded[i]);

  const pinion::OffloadStats stats = session->GetStats();
  std::printf("%s: %llu tensors were offloaded, %llu bytes fetched; the gradients are %s\n",
              device.str().c_str(), static_cast<unsigned long long>(stats.offloaded),
              static_cast<unsigned long long>(stats.fetched_bytes), equal ? "equal" : "NOT equal");
  return equal && stats.offloaded > 0 && stats.fetched_bytes > 0 ? 0 : 1;
}
