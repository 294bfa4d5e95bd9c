// The state of forward that a recomputation of a segment restores. CheckpointInputs keeps the
// segment's inputs. ForwardState keeps streams, device, autocast state and random number
// generators.
//
//   const ForwardState forward(inputs, /*preserve_rng_state=*/true);
//   ...
//   const ForwardState::Place place(forward);    // on any thread
//   const ForwardState::Mode mode(forward);
//
// Thread safety: immutable. A Place or Mode changes the calling thread's state. A Mode also changes
// the process's generators: only one may exist at a time.

#ifndef PINION_HOOKS_CHECKPOINT_FORWARD_STATE_H_
#define PINION_HOOKS_CHECKPOINT_FORWARD_STATE_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <string>
#include <vector>

#include "pinion/engine/stream/wait_site.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// The wait of a stream that reads a tensor which was recomputed on another stream.
inline constexpr WaitSite kComputedOnOtherStream("kComputedOnOtherStream", kHooksWaits);

// Makes `stream` wait until `tensor` is computed on `made_on`, which forward used.
void WaitForTensor(const at::Tensor& tensor, const c10::Stream& made_on, const c10::Stream& stream);

class ForwardState {
 public:
  // Records the calling thread's state and, with preserve_rng_state, the generators of the CPU, the
  // current device and the inputs' devices.
  ForwardState(const std::vector<at::Tensor>& inputs, bool preserve_rng_state);

  // Returns whether Mode sets any generators.
  bool has_generators() const { return !generators_.empty(); }

  // Makes forward's device and streams current. The inputs are ready on these streams.
  class [[nodiscard]] Place {
   public:
    [[nodiscard]] explicit Place(const ForwardState& forward)
        : device_(forward.device_), streams_(forward.streams_) {}

   private:
    const c10::OptionalDeviceGuard device_;
    const c10::MultiStreamGuard streams_;
  };

  // Restores forward's autocast state and generators, and undoes that in its destructor.
  class Mode;

 private:
  struct Autocast {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  struct GeneratorState {
    at::Generator generator;
    at::Tensor state;

    void Set() const;
  };

  // Records the calling thread's state and the given generators.
  explicit ForwardState(const std::vector<at::Generator>& generators);
  std::vector<at::Generator> generators() const;
  void SetAutocast() const;

  std::optional<c10::Device> device_;  // the current device; nothing without an accelerator
  std::vector<c10::Stream> streams_;   // of each device of the accelerator
  std::vector<Autocast> autocast_;
  bool autocast_cache_enabled_;
  std::vector<GeneratorState> generators_;
};

class [[nodiscard]] ForwardState::Mode {
 public:
  [[nodiscard]] explicit Mode(const ForwardState& forward);
  ~Mode();
  Mode(const Mode&) = delete;
  Mode& operator=(const Mode&) = delete;

 private:
  void SetBack() const;

  const ForwardState before_;
};

// Saves the inputs of a checkpointed segment, as an operator saves its arguments.
//
//   const auto inputs = MakeNode<CheckpointInputs>(tensors);  // packs them
//   segment(inputs->Unpack());
//
// Thread safety: that of torch::autograd::SavedVariable.
//
// In no graph. A node gives the saved inputs a sequence number, like an operator's.
class CheckpointInputs : public torch::autograd::Node {
 public:
  explicit CheckpointInputs(const std::vector<at::Tensor>& inputs);

  std::string name() const override { return "PinionCheckpointInputs"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;

  // Returns the inputs without their history, so that a backward in the segment ends at them.
  std::vector<at::Tensor> Unpack();

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_FORWARD_STATE_H_
