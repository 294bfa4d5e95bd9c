// Weights that live on the host and visit the device: a model larger than the device trains, and
// answers, with a window of its layers there.
//
//   auto model = MyModel();                                         // built on the host
//   PINION_ASSIGN_OR_RETURN(auto weights, pinion::WeightOffloader::Attach(
//       *model, torch::kCUDA, pinion::CudaBackend(), {.window_bytes = 2 << 30}));
//   torch::optim::AdamW optimizer(weights->host_parameters(), 1e-4);
//   for (...) {
//     model->forward(x).sum().backward();   // layers come and go by themselves
//     weights->ClipGradNorm(1.0);
//     weights->Step([&] { optimizer.step(); });   // on the host
//     optimizer.zero_grad();
//   }
//
// The master copy of each parameter is in pinned host memory. module->parameters() and the
// optimizer still have the same tensors, on the device. Such a tensor has memory there while an
// operator uses its layer, forward or backward; which module or function calls the operator does
// not matter (visiting_tensor.h). Layers come ahead of their use as the step before used them
// (engine/plan/visit_schedule.h); nothing is copied back but gradients.
//
// Results are those of a model that stays on the device, bit for bit; of an optimizer, those of its
// arithmetic on the host.
//
// Reading a parameter gives its value (clone(), cpu(), item()); torch::save and torch::load, which
// take storages without an operator, go within WithParametersOnHost, or throw. Writing to one on
// the device throws: change host_parameters() within Step. An optimizer over module->parameters()
// throws for that reason.
//
// Gradients are at host_parameters()[i].grad(), in pinned memory. A parameter's grad() shows them
// on the device, and copies them there for operators that read it. What is done to it holds for the
// host copy: zero_grad(), of the module or an optimizer of either, mutable_grad() = ..., operators
// in place. So do requires_grad_() and set_grad_dtype() of the parameter, at the latest from the
// next WaitForGradients on, which Step and ClipGradNorm begin with. Hooks on parameters run, also
// one after accumulation.
//
// With autocast, switch its cache off (at::autocast::set_autocast_cache_enabled(false)): it keeps
// the cast of every weight on the device until forward ends.
//
// Thread safety: operators may use the model on several threads and streams. Attach, Step,
// ClipGradNorm and ZeroGrad are for when no operator of the model runs.
// Ownership: the model's storages keep what they need, so that the model goes on to work without
// the WeightOffloader; host_parameters() keep the masters.
// Errors: absl::Status at Attach, and then nothing is attached; c10::Error elsewhere.

#ifndef PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_
#define PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
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
#include "pinion/hooks/weights/master_watch.h"

namespace pinion {

struct WeightOptions {
  HostTierOptions tier;  // shared with all other users of the process's tier
  // Device memory for all units of weights that are there at once (weight_units.h). 0: what the two
  // largest take, so that one can come while the other is used; with a target, what that leaves. A
  // window and a target exclude each other. The device holds the gradients of two units besides; of
  // three if the window is larger than the two largest.
  uint64_t window_bytes = 0;
  // All that LibTorch's allocator may have given out on the device while the model is used, beside
  // which units take what is left: give an OffloadSession's OffloadOptions::memory_target_bytes the
  // same number. What has not been done before runs with the least, which is the unit in use; a
  // target below what that takes is reported in the log, with the least (WeightStats). 0: none.
  uint64_t memory_target_bytes = 0;
  // Gradients stay on the device until Step, ClipGradNorm or WaitForGradients, so that those of
  // several backwards are added there and cross the link once. The device needs room for all of
  // them, and the stream that is current then has to come after those of the backwards.
  bool gradients_stay = false;
};

class WeightOffloader {
 public:
  // The module's parameters go to pinned host memory, from wherever they are; of one that is on the
  // host no byte passes through the device. Costs one copy of all of them. Gradients that are there
  // go to the masters'.
  //
  // InvalidArgument: a window, or a target, that has no room for the largest unit; a module without
  // parameters; a parameter that is not strided, or that is on yet another device.
  // FailedPrecondition: PINION_DISABLE=1 is set; the tier exists with other options; a parameter
  // visits already. Unimplemented: the device's memory is the host's. ResourceExhausted: no room in
  // host memory.
  static absl::StatusOr<std::unique_ptr<WeightOffloader>> Attach(torch::nn::Module& module,
                                                                 c10::Device device,
                                                                 const DeviceBackend& backend,
                                                                 const WeightOptions& options = {});

  // The masters, in the order of module.parameters() at Attach: shapes, types and requires_grad as
  // there.
  // A change outside Step makes the next use of its layer throw, and so does an optimizer that
  // steps outside Step. Exception: of writes through data(), as LibTorch's SGD makes them, only
  // those are seen that follow a backward and change one of 16 words of the parameter.
  const std::vector<at::Tensor>& host_parameters() const { return host_parameters_; }

  // Runs `step`, which may change any masters and reads their gradients, all of which have arrived.
  // What it has changed is fetched anew, and counts as changed in place: a graph that was made
  // before raises autograd's own error. Meanwhile the model must not be used. Throws where a
  // parameter was given other memory since Attach, as by torch::load into the module: load before,
  // or into host_parameters() within Step; and where a parameter came to the module since then.
  void Step(const std::function<void()>& step);

  // Runs `work` while the module's parameters and large buffers are tensors of the host, over the
  // masters: for what reads or writes storages without an operator (torch::save, torch::load), and
  // for initialising. What it gives a parameter for new memory is copied to the master; all counts
  // as changed in place. Errors as those of Step.
  void WithParametersOnHost(const std::function<void()>& work);

  // As torch::nn::utils::clip_grad_norm_, on the host: returns the norm before. Errors as those of
  // Step.
  double ClipGradNorm(double max_norm);
  // Of the parameters and the masters, to none.
  void ZeroGrad();
  // Blocks until host_parameters()[i].grad() are complete, and have all that was done to the
  // parameters' grad(). Step and ClipGradNorm do it themselves. Throws, and names the parameter,
  // where a master cannot follow it: one that came after Attach, one with other memory, a
  // master with another requires_grad.
  void WaitForGradients();

  WeightStats GetStats() const;

 private:
  WeightOffloader() = default;

  std::shared_ptr<DeviceWeights> weights_;
  std::shared_ptr<HostGradients> gradients_;
  std::vector<at::Tensor> host_parameters_;
  // A weight of the module, as long as that lives.
  struct Weight {
    std::string name;
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // on the device
    at::Tensor master;
    std::shared_ptr<MasterWatch> watch;
    uint32_t unit = 0;
  };

  // Throw, and name the parameter.
  void CheckSameParameters() const;
  void CheckAllVisit() const;

  std::vector<Weight> all_;
  // All that the module had, so that none that comes later has the address of one.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters_;
  std::vector<std::pair<std::string, std::weak_ptr<torch::nn::Module>>> roots_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_OFFLOADER_H_
