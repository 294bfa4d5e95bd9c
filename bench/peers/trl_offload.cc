#include "pinion/bench/peers/trl_offload.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/Event.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/bench/peers/peer_streams.h"
#include "pinion/bench/peers/pinned_cache.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

// The addresses that TRL tracks: a saved tensor whose address and type are tracked is not copied.
//
// TRL adds an offset in elements to the storage's address in bytes, so that two views of one
// storage may share a key by chance.
using TrlKey = std::pair<uintptr_t, c10::ScalarType>;

inline TrlKey TrlKeyOf(const at::Tensor& tensor) {
  return {reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset(),
          tensor.scalar_type()};
}

class TrlKeys {
 public:
  bool Contains(const TrlKey& key) const { return id_of_key_.contains(key); }

  // Ties the key to the saved tensor `id` instead of an earlier one.
  void Track(const TrlKey& key, int64_t id) {
    id_of_key_[key] = id;
    key_of_id_.insert_or_assign(id, key);
  }

  void Release(int64_t id) {
    const auto key = key_of_id_.find(id);
    if (key == key_of_id_.end()) return;
    const auto tracked = id_of_key_.find(key->second);
    if (tracked != id_of_key_.end() && tracked->second == id) id_of_key_.erase(tracked);
    key_of_id_.erase(key);
  }

  void Clear() {
    id_of_key_.clear();
    key_of_id_.clear();
  }

 private:
  std::map<TrlKey, int64_t> id_of_key_;
  std::map<int64_t, TrlKey> key_of_id_;
};

namespace {

bool IsBroadcast(const at::Tensor& tensor) {
  const at::IntArrayRef strides = tensor.strides();
  return std::find(strides.begin(), strides.end(), 0) != strides.end();
}

}  // namespace

// The state of TrlOffload, reached through its packer and its scope.
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
  std::pair<uint64_t, uint64_t> node_;  // the last reading node's thread and sequence number
  std::vector<std::pair<int64_t, at::Tensor>> backward_stash_;  // in the order of copies back
  std::map<int64_t, TrlStreams::Record> read_;                  // by completed nodes
};

class TrlState::AfterNode : public torch::autograd::FunctionPostHook {
 public:
  AfterNode(std::shared_ptr<TrlState> state, int64_t id, size_t storage_uses,
            std::vector<int64_t> previous_ids)
      : state_(std::move(state)),
        id_(id),
        storage_uses_(storage_uses),
        previous_ids_(std::move(previous_ids)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    state_->NodeHasRun(id_, storage_uses_, previous_ids_);
    return outputs;
  }

 private:
  const std::shared_ptr<TrlState> state_;
  const int64_t id_;
  const size_t storage_uses_;
  const std::vector<int64_t> previous_ids_;
};

TrlState::TrlState(TrlOptions options, c10::Device device)
    : options_(std::move(options)),
      device_(device),
      streams_(device, options_.log),
      host_memory_(device) {
  PINION_CHECK(options_.max_fwd_stash_size >= 1)
      << "max_fwd_stash_size is " << options_.max_fwd_stash_size << ", and must be at least 1";
}

int64_t TrlState::Pack(const at::Tensor& saved) {
  if (is_first_pack_) {
    is_first_pack_ = false;
    is_first_unpack_ = true;
    keys_.Clear();
  }
  const int64_t id = ++last_id_;
  streams_.Log("pack ", id);
  const TrlKey key = TrlKeyOf(saved);
  const bool is_tracked = keys_.Contains(key);
  if (is_tracked || StaysOnDevice(saved)) {
    tracker_[id] = {.tensor = DetachedAlias(saved)};
    if (is_tracked) keys_.Track(key, id);
  } else if (!IsBroadcast(saved) && (!saved.is_contiguous() || saved.storage_offset() != 0)) {
    Offload(id, saved.clone(c10::MemoryFormat::Contiguous), key);
  } else {
    Offload(id, DetachedAlias(saved), key);
  }
  return id;
}

bool TrlState::StaysOnDevice(const at::Tensor& tensor) const {
  return tensor.device().type() != device_.type() || tensor.nbytes() < options_.min_offload_size ||
         std::any_of(options_.parameters.begin(), options_.parameters.end(),
                     [&](const at::Tensor& p) { return p.is_alias_of(tensor); });
}

void TrlState::Offload(int64_t id, const at::Tensor& tensor, const TrlKey& key) {
  DropForwardStash(id - options_.max_fwd_stash_size);
  streams_.WaitsForOther(TrlStreams::kComm);
  at::Tensor source = tensor;
  if (IsBroadcast(tensor)) {
    const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    source = at::as_strided(tensor, {elements}, {1}, /*storage_offset=*/0);
  }
  at::Tensor host;
  {
    const c10::StreamGuard guard(streams_.Of(TrlStreams::kComm));
    host = host_memory_.Empty(source.sizes(), source.scalar_type());
    streams_.Log("out ", source.nbytes());
    host.copy_(source, /*non_blocking=*/true);
    // The copy back also runs on this stream: the cache waits for all its work at the tensor's end.
    host_memory_.UsedOn(streams_.Of(TrlStreams::kComm), host);
  }
  stats_.offloaded_bytes += host.nbytes();
  tracker_[id] = {.tensor = host,
                  .offloaded = true,
                  .sizes = tensor.sizes().vec(),
                  .strides = tensor.strides().vec(),
                  .storage_offset = tensor.storage_offset()};
  forward_stash_.emplace(id, Stashed{tensor, streams_.RecordOn(TrlStreams::kComm)});
  keys_.Track(key, id);
}

at::Tensor TrlState::Unpack(int64_t id) {
  streams_.Log("unpack ", id);
  if (is_first_unpack_) {
    is_first_unpack_ = false;
    backward_ = CurrentBackward();
    // Not AtEndOfBackward: TRL's callback does not run after a backward that throws.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this()] { self->EndOfBackward(); });
  }
  const auto entry = tracker_.find(id);
  TORCH_CHECK(entry != tracker_.end(), "untracked tensor with id ", id);
  const Tracked tracked = std::move(entry->second);
  const at::Tensor tensor = tracked.offloaded ? Read(id, tracked) : tracked.tensor;
  tracker_.erase(entry);
  keys_.Release(id);
  if (tracker_.empty()) is_first_pack_ = true;
  return tensor;
}

at::Tensor TrlState::Read(int64_t id, const Tracked& tracked) {
  const auto reader = torch::autograd::get_current_node();
  const std::pair<uint64_t, uint64_t> node(reader->thread_id(), reader->sequence_nr());
  std::vector<int64_t> previous_ids;
  if (CurrentBackward() == backward_ && node_ != node) {
    node_ = node;
    for (const auto& [stashed_id, tensor] : backward_stash_) previous_ids.push_back(stashed_id);
  }
  const auto stashed = forward_stash_.find(id);
  const at::Tensor tensor =
      stashed != forward_stash_.end() ? stashed->second.tensor : Fetch(id, tracked);
  reader->add_post_hook(std::make_unique<AfterNode>(
      shared_from_this(), id, tensor.storage().use_count(), std::move(previous_ids)));
  return tensor;
}

at::Tensor TrlState::Fetch(int64_t id, const Tracked& tracked) {
  at::Tensor fetched;
  {
    const c10::StreamGuard guard(streams_.Of(TrlStreams::kComm));
    streams_.Log("in ", tracked.tensor.nbytes());
    fetched = tracked.tensor.to(at::TensorOptions(device_), /*non_blocking=*/true);
    fetched = at::as_strided(fetched, tracked.sizes, tracked.strides, tracked.storage_offset);
  }
  stats_.fetched_bytes += tracked.tensor.nbytes();
  streams_.WaitsForOther(TrlStreams::kCompute);
  backward_stash_.emplace_back(id, fetched);
  return fetched;
}

void TrlState::NodeHasRun(int64_t id, size_t storage_uses,
                          const std::vector<int64_t>& previous_ids) {
  if (const at::Tensor* const fetched = FindInBackwardStash(id)) {
    // Additional uses are live views, such as the node's results.
    if (fetched->storage().use_count() > storage_uses) {
      streams_.Log("recorded on compute");
      fetched->record_stream(streams_.Of(TrlStreams::kCompute));
      DropFromBackwardStash(id);
    } else {
      read_.insert_or_assign(id, streams_.RecordOn(TrlStreams::kCompute));
    }
  }
  DropForwardStash(last_id_);
  for (const int64_t previous_id : previous_ids) {
    const auto read = read_.find(previous_id);
    if (read != read_.end()) {
      streams_.WaitsFor(TrlStreams::kComm, read->second);
      read_.erase(read);
    }
    if (FindInBackwardStash(previous_id) != nullptr) DropFromBackwardStash(previous_id);
  }
}

void TrlState::EndOfBackward() {
  while (!backward_stash_.empty()) {
    const int64_t id = backward_stash_.front().first;
    const auto read = read_.find(id);
    if (read != read_.end()) streams_.WaitsFor(TrlStreams::kComm, read->second);
    DropFromBackwardStash(id);
  }
}

void TrlState::DropForwardStash(int64_t last_id) {
  while (!forward_stash_.empty() && forward_stash_.begin()->first <= last_id) {
    const auto oldest = forward_stash_.begin();
    const int64_t id = oldest->first;
    streams_.WaitsFor(TrlStreams::kCompute, oldest->second.copied);
    streams_.Log("forward stash drops ", id);
    forward_stash_.erase(oldest);
    keys_.Release(id);
  }
}

void TrlState::DropFromBackwardStash(int64_t id) {
  streams_.Log("backward stash drops ", id);
  std::erase_if(backward_stash_, [id](const auto& entry) { return entry.first == id; });
}

const at::Tensor* TrlState::FindInBackwardStash(int64_t id) const {
  const auto entry = std::find_if(backward_stash_.begin(), backward_stash_.end(),
                                  [id](const auto& stashed) { return stashed.first == id; });
  return entry == backward_stash_.end() ? nullptr : &entry->second;
}

void TrlState::ClearStashes() {
  while (!backward_stash_.empty()) DropFromBackwardStash(backward_stash_.front().first);
  read_.clear();
  for (const auto& entry : forward_stash_) streams_.Log("forward stash drops ", entry.first);
  forward_stash_.clear();
}

void TrlState::Enter() {
  tracker_.clear();
  keys_.Clear();
  last_id_ = 0;
  is_first_pack_ = true;
  is_first_unpack_ = true;
  ClearStashes();
}

void TrlState::Exit() {
  streams_.Synchronize();
  ClearStashes();
}

namespace {

class Saved : public SavedTensor {
 public:
  Saved(std::shared_ptr<TrlState> state, int64_t id) : state_(std::move(state)), id_(id) {}
  at::Tensor Unpack() override { return state_->Unpack(id_); }

 private:
  const std::shared_ptr<TrlState> state_;
  const int64_t id_;
};

}  // namespace

TrlOffload::TrlOffload(TrlOptions options, c10::Device device)
    : state_(std::make_shared<TrlState>(std::move(options), device)) {}

std::unique_ptr<SavedTensor> TrlOffload::Pack(const at::Tensor& tensor, const GraphPlace&) {
  return std::make_unique<Saved>(state_, state_->Pack(tensor));
}

PeerStats TrlOffload::GetStats() const { return state_->stats(); }

TrlScope::TrlScope(const std::shared_ptr<TrlOffload>& offload)
    : state_(offload->state_), scope_(offload) {
  state_->Enter();
}

TrlScope::~TrlScope() {
  try {
    state_->Exit();
  } catch (const c10::Error& error) {
    PINION_LOG(kError) << "ending a TrlScope: " << error.what_without_backtrace();
  }
}

}  // namespace pinion
