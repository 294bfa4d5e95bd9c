// Streams a model's weights from host memory to the device, layer by layer, so that a model larger
// than the device can be trained and used.
//
//   auto model = MyModel();                                         // built on the host
//   PINION_ASSIGN_OR_RETURN(auto weights, pinion::WeightOffloader::Attach(
//       *model, torch::kCUDA, pinion::CudaBackend(), {.window_bytes = 2 << 30}));
//   torch::optim::AdamW optimizer(weights->host_parameters(), 1e-4);
//   for (...) {
//     model->forward(x).sum().backward();   // layers are fetched and evicted automatically
//     weights->ClipGradNorm(1.0);
//     weights->Step([&] { optimizer.step(); });   // on the host
//     optimizer.zero_grad();
//   }
//
// The master copy of each parameter is in pinned host memory. module->parameters() and the
// optimizer still have the same tensors, on the device. Such a tensor has memory there only while
// an operator uses its layer, in forward or backward. Any module or function may call the operator
// (streamed_tensor.h). Layers are prefetched in the order in which the previous step used them
// (engine/schedule/weight_prefetcher.h). Only gradients are copied back.
//
// Results equal those of a resident model bit for bit. An optimizer's arithmetic is the host's.
//
// Operators that read a parameter get its value (clone(), cpu(), item()). Operators that write to
// one throw: change host_parameters() within Step. Optimizers therefore take host_parameters().
// torch::save and torch::load, which access storages without operators, throw outside of
// WithParametersOnHost.
//
// Gradients are at host_parameters()[i].grad(), in pinned memory. A parameter's grad() shows them
// on the device, and copies them there for operators that read it. Changes of it hold for the host
// copy: zero_grad() of the module or of an optimizer, mutable_grad() = ..., in-place operators. The
// parameter's requires_grad_() and set_grad_dtype() hold from the next WaitForGradients, Step or
// ClipGradNorm on. All hooks on parameters run.
//
// A tensor that the program sets as grad() and keeps, such as a bucket, must not change afterwards,
// by backward either: the next of these calls throws. Set a clone().
//
// With autocast, switch its cache off (at::autocast::set_autocast_cache_enabled(false)): it keeps
// the cast of every weight on the device until forward ends.
//
// Thread safety: operators may use the model on several threads and streams. Call the functions of
// this class while no operator of the model runs.
// Ownership: the model works on without the WeightOffloader. host_parameters() own their memory.
// Errors: Attach returns absl::Status, and changes nothing on an error. Other functions throw
// c10::Error, and name the parameter.

#ifndef PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_
#define PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/weights/device_weights.h"
#include "pinion/hooks/weights/host_gradients.h"

namespace pinion {

struct WeightOptions {
  HostTierOptions tier;  // shared with all other users of the process's tier
  // Device memory for resident units of weights (weight_masters.h). 0: the two largest units, so
  // that one is fetched while the other is used. Excludes a memory target. The device also holds
  // the gradients of two units, or of three with a window larger than the two largest units.
  uint64_t window_bytes = 0;
  // Limit of everything that LibTorch's allocator has allocated on the device while the model is
  // used. 0: none. Give OffloadOptions::memory_target_bytes the same value. Resident units take
  // what the rest of the program leaves. Operations that run for the first time keep a single unit
  // resident. If even this exceeds the target, the log and WeightStats say what is enough.
  uint64_t memory_target_bytes = 0;
  // Keeps gradients on the device until Step, ClipGradNorm or WaitForGradients. Gradients of
  // several backwards are then added there and copied once. The device needs memory for all of
  // them. Call these functions on a stream that comes after those of the backwards.
  bool gradients_stay = false;
};

class WeightOffloader {
 public:
  // Copies the module's parameters and gradients to pinned host memory, and makes the module stream
  // them. Parameters may be on the device or on the host, from where they do not pass through the
  // device.
  //
  // InvalidArgument: a window or target smaller than the largest unit; a module without parameters;
  // a parameter that is not strided, or on another device.
  // FailedPrecondition: PINION_DISABLE=1 is set; the tier exists with other options; a parameter is
  // streamed already. Unimplemented: the device shares the host's memory. ResourceExhausted: there
  // is no host memory.
  static absl::StatusOr<std::unique_ptr<WeightOffloader>> Attach(torch::nn::Module& module,
                                                                 c10::Device device,
                                                                 const DeviceBackend& backend,
                                                                 const WeightOptions& options = {});

  // The host copies, in the order of module.parameters() at Attach.
  // If one is changed outside Step, for example by an optimizer, the next use of its layer throws.
  // Exception: a write through data(), as in LibTorch's SGD, is noticed only if it follows a
  // backward and changes one of 16 words of the parameter.
  const std::vector<at::Tensor>& host_parameters() const { return host_parameters_; }

  // Waits for gradients and runs `step`, which may read them and change host copies. The model must
  // not be used meanwhile. Changed weights count as changed in place: backward of an older graph
  // throws autograd's error. Throws if a parameter has other memory than at Attach, for example by
  // torch::load, or if the module has a new parameter, and within Step or WithParametersOnHost.
  void Step(const std::function<void()>& step);

  // Runs `work` while the module's parameters and large buffers are plain host tensors: for
  // torch::save, torch::load and initialisation. If `work` gives a parameter new memory, its values
  // are copied to the host copy. All weights count as changed in place. Errors: those of Step.
  void WithParametersOnHost(const std::function<void()>& work);

  // Clips gradients like torch::nn::utils::clip_grad_norm_, on the host. Returns the norm before.
  // Errors: those of Step.
  double ClipGradNorm(double max_norm);
  // Sets the gradients of parameters and host copies to none.
  void ZeroGrad();
  // Blocks until host_parameters()[i].grad() are complete, with all changes of the parameters'
  // grad(). Step and ClipGradNorm begin with it. Errors: those of Step, and a host copy whose
  // requires_grad differs from its parameter's.
  void WaitForGradients();

  WeightStats GetStats() const;

 private:
  WeightOffloader() = default;

  std::shared_ptr<DeviceWeights> weights_;
  std::shared_ptr<HostGradients> gradients_;
  std::vector<at::Tensor> host_parameters_;

  // Throw, and name the parameter, or the public function `call` within WithParametersOnHost.
  void CheckSameParameters() const;
  void WaitForGradientsOf(const char* call);

  std::vector<StreamedWeight> all_;
  bool on_host_ = false;  // within WithParametersOnHost
  // The module's parameters at Attach. Weak references keep the addresses from being reused.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters_;
  std::vector<std::pair<std::string, std::weak_ptr<torch::nn::Module>>> roots_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_
