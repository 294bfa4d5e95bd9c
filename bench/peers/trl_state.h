// What TrlOffload does and remembers: its packer and its scope are the ways in.
//
// Thread safety: as TrlOffload.

#ifndef PINION_BENCH_PEERS_TRL_STATE_H_
#define PINION_BENCH_PEERS_TRL_STATE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "pinion/bench/peers/peer_stats.h"
#include "pinion/bench/peers/pinned_cache.h"
#include "pinion/bench/peers/trl_keys.h"
#include "pinion/bench/peers/trl_offload.h"
#include "pinion/bench/peers/trl_streams.h"

namespace pinion {

class TrlState : public std::enable_shared_from_this<TrlState> {
 public:
  TrlState(TrlOptions options, c10::Device device);

  // The number of the saved tensor, which Unpack takes once.
  int64_t Pack(const at::Tensor& tensor);
  at::Tensor Unpack(int64_t id);
  void Enter();
  void Exit();
  const PeerStats& stats() const { return stats_; }

 private:
  class AfterNode;

  struct Tracked {
    at::Tensor tensor;
    bool offloaded = false;
    // What the copy was made of, if there is one.
    std::vector<int64_t> sizes = {};
    std::vector<int64_t> strides = {};
    int64_t storage_offset = 0;
  };

  struct Stashed {
    at::Tensor tensor;
    TrlStreams::Record copied;
  };

  bool StaysOnDevice(const at::Tensor& tensor) const;
  void Offload(int64_t id, const at::Tensor& tensor, const TrlKey& key);
  at::Tensor Read(int64_t id, const Tracked& tracked);
  at::Tensor Fetch(int64_t id, const Tracked& tracked);
  // `storage_uses` were there when the node read the tensor; the nodes before it have read
  // `previous_ids`.
  void NodeHasRun(int64_t id, size_t storage_uses, const std::vector<int64_t>& previous_ids);
  void EndOfBackward();
  // The compute stream waits for the copies of tensors up to `last_id`, and they leave the device.
  void DropForwardStash(int64_t last_id);
  void DropFromBackwardStash(int64_t id);
  const at::Tensor* FindInBackwardStash(int64_t id) const;
  void ClearStashes();

  const TrlOptions options_;
  const c10::Device device_;
  TrlStreams streams_;
  PinnedCache host_memory_;
  PeerStats stats_;

  int64_t last_id_ = 0;
  std::map<int64_t, Tracked> tracker_;
  TrlKeys keys_;
  bool is_first_pack_ = true;                 // of a forward
  std::map<int64_t, Stashed> forward_stash_;  // saved, and still on the device

  bool is_first_unpack_ = true;  // of a backward
  int64_t backward_ = -1;
  std::weak_ptr<torch::autograd::Node> node_;                   // the last one that has read
  std::vector<std::pair<int64_t, at::Tensor>> backward_stash_;  // copied back, in this order
  std::map<int64_t, TrlStreams::Record> read_;                  // by nodes that have run
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_TRL_STATE_H_
