// The copies of GraphOffload: a stream for each direction and a pool of pinned buffers.
//
//   std::shared_ptr<GraphCopy> copy = copies.CopyOut(tensor);   // when it is saved
//   copies.DropSource(*copy);                                   // some layers later
//   copies.Fetch(*copy);                                        // some layers before its first use
//   at::Tensor flat = copies.Use(*copy);                        // at each use
//
// Waits are on the calling thread's current stream; the host never waits.
//
// Thread safety: as GraphOffload.

#ifndef PINION_BENCH_PEERS_GRAPH_COPIES_H_
#define PINION_BENCH_PEERS_GRAPH_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/bench/peers/peer_stats.h"
#include "pinion/bench/peers/pinned_cache.h"

namespace pinion {

// A contiguous tensor's copies to the host and back. Members are set while they are needed. If a
// step is abandoned, members are freed after their copy, on the current stream.
struct GraphCopy {
  GraphCopy() = default;
  ~GraphCopy();
  GraphCopy(const GraphCopy&) = delete;
  GraphCopy& operator=(const GraphCopy&) = delete;

  at::Tensor source;
  std::optional<c10::Event> copied_out;
  at::Tensor host;  // flat, like `fetched`
  at::Tensor fetched;
  std::optional<c10::Event> copied_in;
};

class GraphCopies {
 public:
  explicit GraphCopies(c10::Device device);

  std::shared_ptr<GraphCopy> CopyOut(const at::Tensor& tensor);
  // Drops the source. Its device memory is freed with the tensor's last other reference.
  void DropSource(GraphCopy& copy) const;
  // Starts the copy back at the first call.
  void Fetch(GraphCopy& copy);
  // Fetches if necessary. The first call returns the host buffer to the pool.
  at::Tensor Use(GraphCopy& copy);

  const PeerStats& stats() const { return stats_; }

 private:
  using Kind = std::pair<int64_t, c10::ScalarType>;  // elements

  at::Tensor TakeBuffer(const Kind& kind);

  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
  PinnedCache host_memory_;
  std::map<Kind, std::vector<at::Tensor>> pool_;
  PeerStats stats_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_COPIES_H_
