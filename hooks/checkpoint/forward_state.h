// What a segment finds around it when it runs: the current streams and device, autocast, and the
// states of random generators. Noted in forward, set again where the segment is computed again.
//
//   const ForwardState forward(inputs, /*preserve_rng_state=*/true);
//   ...
//   const ForwardState::Place place(forward);    // on whatever thread
//   const ForwardState::Mode mode(forward);
//
// Thread safety: a noted state is constant. Setting it changes the calling thread's state and, of
// the generators, the process's: one thread at a time.

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

#include <optional>
#include <vector>

namespace pinion {

class ForwardState {
 public:
  // Of the calling thread, and of the generators of the CPU, of the current device and of the
  // inputs' devices.
  ForwardState(const std::vector<at::Tensor>& inputs, bool preserve_rng_state);

  // Whether Mode sets any.
  bool has_generators() const { return !generators_.empty(); }

  // While it lives, the streams and the device are forward's: there the inputs are known to be
  // ready, and their memory is ordered.
  class [[nodiscard]] Place {
   public:
    [[nodiscard]] explicit Place(const ForwardState& forward)
        : device_(forward.device_), streams_(forward.streams_) {}

   private:
    const c10::OptionalDeviceGuard device_;
    const c10::MultiStreamGuard streams_;
  };

  // While it lives, autocast and random numbers are forward's.
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

  // Of the calling thread, and of those generators.
  explicit ForwardState(const std::vector<at::Generator>& generators);
  std::vector<at::Generator> generators() const;
  void SetAutocast() const;

  std::optional<c10::Device> device_;  // the current one; none without an accelerator
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

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_FORWARD_STATE_H_
