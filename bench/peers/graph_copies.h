// The copies of GraphOffload: a stream for each direction and a pool of pinned buffers.
//
//   std::shared_ptr<GraphCopy> copy = copies.CopyOut(tensor);   // when it is saved
//   copies.DropSource(*copy);                                   // some layers later
//   copies.Fetch(*copy);                                        // some layers before its first use
//   at::Tensor flat = copies.Use(*copy);                        // at each use
//
// All of it belongs to the current stream of the calling thread, which waits; the host does not.
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

// A contiguous tensor on its way out and back. Each member is there while it is needed. What goes
// before its copy is done, in a step that is given up, goes after it on the current stream.
struct GraphCopy {
  GraphCopy() = default;
  ~GraphCopy();
  GraphCopy(const GraphCopy&) = delete;
  GraphCopy& operator=(const GraphCopy&) = delete;

  at::Tensor source;
  std::optional<c10::Event> copied_out;
  at::Tensor host;  // flat, as `fetched` is
  at::Tensor fetched;
  std::optional<c10::Event> copied_in;
};

class GraphCopies {
 public:
  explicit GraphCopies(c10::Device device);

  std::shared_ptr<GraphCopy> CopyOut(const at::Tensor& tensor);
  // The device memory goes when the tensor's other users let go of it.
  void DropSource(GraphCopy& copy) const;
  // Once; does nothing after that.
  void Fetch(GraphCopy& copy);
  // Fetches what was not fetched. The first call gives the host's buffer back.
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
