// Lists the tensors that graphs hold through an OffloadSession, to find a graph that is kept too
// long and the code that made it.
//
//   std::printf("%s", pinion::ToString(session->LiveTensors()).c_str());
//
//   Float [64, 32], 8 KiB, made by ReluBackward0, saved by node 17 of scope 3 (opened since: 2) on
//   device 0, held 2 times, in host memory
//
// Tensors that share a storage at one version are one entry. Tensors that the session declined
// (parameters, small ones, a head's, those saved in a backward) belong to the graph and are not
// listed. Tensors that were to be offloaded and stayed are listed as on the device
// (OffloadStats::kept_as_planned, kept_held, kept_no_host_memory, failed copies). Entries are
// ordered by device and by their last save.

#ifndef PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_
#define PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion {

struct LiveTensor {
  std::string tensor;       // type and sizes when first saved: "Float [64, 32]"
  std::string made_by;      // the node that computed it: "ReluBackward0"; empty for a leaf
  uint64_t node = 0;        // autograd's sequence number of the node that first saved it
  uint64_t scope = 0;       // numbered in the process, from 1
  uint64_t scopes_ago = 0;  // scopes opened later in the process
  int device_index = 0;
  uint64_t size_bytes = 0;      // the saved part of the storage
  int saved_tensors = 0;        // handles in graphs
  bool on_device = false;       // whether the device has the bytes
  bool in_host_memory = false;  // a copy is stored off the device, or on its way
};

// Returns a line per tensor, in order.
std::string ToString(const std::vector<LiveTensor>& tensors);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_
