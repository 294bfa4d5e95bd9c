// TRL's OffloadActivations with streams (trl/models/activation_offloading.py of 1.16.0, which comes
// from torchtune) in C++, as a baseline. It makes the same decisions, copies, waits and frees in
// the same order. tests/bench/peers/trl_log_test.cc compares its events with those of TRL's own
// file.
//
//   const auto trl = std::make_shared<TrlOffload>(TrlOptions{.parameters = model->parameters()},
//                                                 device);
//   {
//     const TrlScope scope(trl);        // TRL's trainers have a whole step inside
//     loss = model->forward(x);
//     loss.backward();
//   }
//
// As there:
//   saving   One stream for copies, which waits for the compute stream; a pinned tensor, a copy and
//            an event for each saved tensor. The last `max_fwd_stash_size` saved tensors stay on
//            the device. An older one is freed once the compute stream waits for its copy. A tensor
//            that shares address and type with a resident one stays resident, too.
//   reading  A resident tensor is returned. Others are copied back at the read, and the compute
//            stream waits; there is no prefetch. Memory that a node has read is freed when the
//            next node has run.
//   errors   Each tensor can be read once: a second backward over a kept graph throws. A scope
//            forgets what earlier steps have saved. Changes in place are not noticed.
//
// Left out: the warning above 60 % of RAM, copies without streams, pageable memory, Python's own
// tensor types (DTensor, FP8), and the hooks that skip a model's head. `SavedTensorScope(nullptr)`
// around the head's forward does the same.
//
// Thread safety: one thread at a time, as under Python's lock: the one that runs forward, then
// the one that runs the device's backward.
// Ownership: graphs share ownership of the state.

#ifndef PINION_BENCH_PEERS_TRL_OFFLOAD_H_
#define PINION_BENCH_PEERS_TRL_OFFLOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// The bytes that a peer has moved.
struct PeerStats {
  uint64_t offloaded_bytes = 0;
  uint64_t fetched_bytes = 0;
};

struct TrlOptions {
  uint64_t min_offload_size = 1024;         // bytes; tensors of this size are offloaded
  int64_t max_fwd_stash_size = 5;           // at least 1
  std::vector<at::Tensor> parameters = {};  // stay resident, by storage
  // Logs each event, for tests, in the words of tests/bench/peers/trl_log.py.
  std::function<void(const std::string& event)> log = nullptr;
};

class TrlState;

class TrlOffload : public SavedTensorPacker {
 public:
  TrlOffload(TrlOptions options, c10::Device device);

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override;
  PeerStats GetStats() const;

 private:
  friend class TrlScope;
  const std::shared_ptr<TrlState> state_;
};

// TRL's `with` statement. It forgets earlier saves; at its end the host waits for both streams. A
// SavedTensorScope does neither. Scopes do not nest.
class [[nodiscard]] TrlScope {
 public:
  [[nodiscard]] explicit TrlScope(const std::shared_ptr<TrlOffload>& offload);
  ~TrlScope();
  TrlScope(const TrlScope&) = delete;
  TrlScope& operator=(const TrlScope&) = delete;

 private:
  const std::shared_ptr<TrlState> state_;
  const SavedTensorScope scope_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_TRL_OFFLOAD_H_
