// A list of what graphs hold by an OffloadSession's handles: to find out which graph is kept for
// longer than was meant, and who made it.
//
//   std::printf("%s", pinion::ToString(session->LiveTensors()).c_str());
//
//   Float [64, 32], 8 KiB, made by ReluBackward0, saved by node 17 of scope 3 (opened since: 2) on
//   device 0, held 2 times, in host memory
//
// Tensors that share a storage at one version are one entry. What was kept as it was saved
// (parameters, small tensors, what a head saves, what is saved in a backward) is the graph's own
// and not listed. What was to leave and has stayed is listed, as on the device: OffloadStats's
// kept_as_planned, kept_held, kept_no_host_memory, and others whose copy could not be made. The
// order: device by device, and by when a scope saved the entry last.

#ifndef PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_
#define PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion {

struct LiveTensor {
  std::string tensor;       // type and sizes, of what was saved first: "Float [64, 32]"
  std::string made_by;      // the node whose result it is: "ReluBackward0"; empty: a leaf has none
  uint64_t node = 0;        // which saved it first, by autograd's sequence number in its thread
  uint64_t scope = 0;       // numbered through the process, from 1
  uint64_t scopes_ago = 0;  // scopes that were opened since, in the process
  int device_index = 0;
  uint64_t size_bytes = 0;      // of the storage that are saved
  int saved_tensors = 0;        // places in graphs that hold it
  bool on_device = false;       // its bytes are, for whatever reason
  bool in_host_memory = false;  // a copy rests away from the device, or is on its way
};

// A line for each, in their order.
std::string ToString(const std::vector<LiveTensor>& tensors);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LIVE_TENSOR_H_
