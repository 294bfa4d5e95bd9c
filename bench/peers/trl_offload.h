// TRL's OffloadActivations with streams (trl/models/activation_offloading.py of 1.16.0, which comes
// from torchtune), done again in C++ as a baseline for benchmarks: the same decisions, copies,
// waits and frees in the same order, good and bad ones. tests/bench/peers/trl_log_test.cc compares
// it, event by event, with what TRL's own file does.
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
//            the device, and an older one goes once the compute stream waits for its copy. What
//            shares an address and a type with a tensor that is still there stays there, too.
//   reading  What is still there is returned. Anything else is copied back then, and the compute
//            stream waits; nothing is fetched ahead. The memory of what a node has read goes when
//            the next node has run.
//   errors   Each tensor can be read once: a second backward over a kept graph throws. A scope
//            forgets what earlier steps have saved. Changes in place are not noticed.
//
// Not done again: the warning above 60 % of RAM, copies without streams, pageable memory, tensors
// of Python's own types (DTensor, FP8), and the hooks that leave a model's head alone:
// `SavedTensorScope(nullptr)` around the head's forward does that.
//
// Thread safety: one thread at a time, as under Python's lock: the one that runs forward, then
// the one that runs the device's backward.
// Ownership: graphs share ownership of what it remembers.

#ifndef PINION_BENCH_PEERS_TRL_OFFLOAD_H_
#define PINION_BENCH_PEERS_TRL_OFFLOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pinion/bench/peers/peer_stats.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

struct TrlOptions {
  uint64_t min_offload_size = 1024;         // bytes; what has as many leaves
  int64_t max_fwd_stash_size = 5;           // at least 1
  std::vector<at::Tensor> parameters = {};  // stay where they are, by storage
  // Is told of each event, for tests. The words are those of tests/bench/peers/trl_log.py.
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

// TRL's `with` statement. It forgets what was saved before; at its end the host waits for both
// streams. With a SavedTensorScope in its place neither happens. Not to be nested.
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
