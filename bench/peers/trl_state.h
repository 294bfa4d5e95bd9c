// The state of TrlOffload, reached through its packer and its scope.
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

  // Returns the saved tensor's number, which Unpack takes once.
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
    // The copied tensor, if there is a copy.
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
  // `storage_uses` is the count at the node's read. `previous_ids` are the reads of earlier nodes.
  void NodeHasRun(int64_t id, size_t storage_uses, const std::vector<int64_t>& previous_ids);
  void EndOfBackward();
  // Makes the compute stream wait for copies of tensors up to `last_id`, and frees them.
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
  bool is_first_pack_ = true;                 // in this forward
  std::map<int64_t, Stashed> forward_stash_;  // saved and resident

  bool is_first_unpack_ = true;  // in this backward
  int64_t backward_ = -1;
  std::weak_ptr<torch::autograd::Node> node_;                   // the last reading node
  std::vector<std::pair<int64_t, at::Tensor>> backward_stash_;  // in the order of copies back
  std::map<int64_t, TrlStreams::Record> read_;                  // by completed nodes
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_TRL_STATE_H_
