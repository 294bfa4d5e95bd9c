// What things cost on the emulated accelerator: a roofline for kernels, a link model for copies.
//
//   kernel  launch_us + max(flops / peak_flops(type), bytes / memory_bandwidth)
//   copy    fixed_us + bytes / bandwidth             (half-performance size = fixed_us * bandwidth)
//   batch   fixed_us + (pieces - 1) * piece_us + bytes / bandwidth
//   host    bytes / host_memory_bandwidth             (arithmetic over them on the host)
//
// All times are modelled, never measured, and are labelled so wherever they are printed. The
// constants of each preset, with their sources, stand in cost_model.cc and nowhere else.

#ifndef PINION_DEVICE_EMULATED_COST_MODEL_H_
#define PINION_DEVICE_EMULATED_COST_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/device/device.h"

namespace pinion {

enum class ComputeType { kFloat32, kBFloat16, kFloat64 };

struct LinkModel {
  LinkKind kind = LinkKind::kUnknown;
  std::string name;
  double rated_gb_per_s = 0;  // raw, per direction
  double h2d_gb_per_s = 0;    // 1e9 bytes per second, one direction alone
  double d2h_gb_per_s = 0;
  double h2d_duplex_gb_per_s = 0;  // with the other direction busy
  double d2h_duplex_gb_per_s = 0;
  double host_gb_per_s = 0;      // all devices of the host together, per direction; 0: no limit
  double fixed_us = 0;           // per copy
  double piece_us = 0;           // per further piece of a batched copy
  double pageable_gb_per_s = 0;  // pageable memory: slower, and the host blocks
  // A direction's copies are served one after the other, first come, first served, as one copy
  // engine does. Otherwise they share its bandwidth.
  bool one_copy_at_a_time = false;
};

struct DevicePreset {
  std::string name;
  std::string description;     // the device, the link, and that it is modelled
  double float32_tflop_per_s;  // as training reaches them, not the data sheet's
  double bfloat16_tflop_per_s;
  double float64_tflop_per_s;
  double memory_gb_per_s;
  double launch_us;       // on the device, per kernel
  double host_call_us;    // the host clock's cost of a launch or copy call
  double host_event_us;   // of an event or query call
  double pin_ms_per_gib;  // of pinning host memory
  // What elementwise arithmetic on all cores of the device's host reaches, reads and writes
  // counted.
  double host_memory_gb_per_s;
  LinkModel link;

  DevicePreset();  // h100_pcie5

  // InvalidArgument that names the field and its value.
  absl::Status Validate() const;
};

// "a100_pcie4", "h100_pcie5", "b200_pcie5", "gh200_c2c", "gb200_c2c". NotFound names them all.
absl::StatusOr<DevicePreset> FindPreset(const std::string& name);
std::vector<std::string> PresetNames();

// A model as seen by offload. Both are positive.
struct Workload {
  double flops_per_saved_byte;  // FLOPs of a training step per byte of saved activations
  double mean_saved_tensor_bytes;
};

// Shrinks a device so that a small model on it behaves as a large one on `base`. These proportions
// are kept, each against the time that the link takes for the same tensor: the time of its FLOPs
// (if their number per byte is the workload's), of its memory traffic, and all that is paid per
// tensor (launches, host calls, the fixed cost of a copy). So the small model's step is the large
// one's, shortened by the ratio of the tensor sizes.
DevicePreset ScalePreset(const DevicePreset& base, const Workload& large, const Workload& small);

// Milliseconds that the model asks for a kernel or for a copy alone on an idle link.
double KernelMs(const DevicePreset& preset, double flops, double memory_bytes, ComputeType type);

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_COST_MODEL_H_
