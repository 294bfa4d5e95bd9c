// Models the cost of kernels and copies on an emulated accelerator: a roofline, and a link model.
//
//   PINION_ASSIGN_OR_RETURN(options.preset, FindPreset("gh200_c2c"));
//
//   kernel  launch_us + max(flops / peak_flops(type), bytes / memory_bandwidth)
//   copy    fixed_us + bytes / bandwidth             (half-performance size = fixed_us * bandwidth)
//   batch   fixed_us + (pieces - 1) * piece_us + bytes / bandwidth
//   host    bytes / host_memory_bandwidth            (arithmetic on the host)
//
// All times are modelled, never measured, and printed with that label. cost_model.cc holds the
// constants of each preset and their sources.

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
  double h2d_duplex_gb_per_s = 0;  // while the other direction is busy
  double d2h_duplex_gb_per_s = 0;
  double host_gb_per_s = 0;      // limit of all devices of a host together, per direction; 0: none
  double fixed_us = 0;           // per copy
  double piece_us = 0;           // per further piece of a batched copy
  double pageable_gb_per_s = 0;  // for pageable memory; the copy also blocks the host
  // True: each direction copies one at a time, first come, first served, like a single copy engine.
  // False: copies share the bandwidth.
  bool one_copy_at_a_time = false;
};

struct DevicePreset {
  std::string name;
  std::string description;     // device and link, marked as modelled
  double float32_tflop_per_s;  // as reached in training, not the data sheet's peak
  double bfloat16_tflop_per_s;
  double float64_tflop_per_s;
  double memory_gb_per_s;
  double launch_us;       // on the device, per kernel
  double host_call_us;    // the host's cost of a launch or copy call
  double host_event_us;   // the host's cost of an event or query call
  double pin_ms_per_gib;  // for pinning host memory
  // Bandwidth of elementwise arithmetic on all host cores, reads and writes counted.
  double host_memory_gb_per_s;
  LinkModel link;

  DevicePreset();  // h100_pcie5

  // Returns InvalidArgument that names the field and its value.
  absl::Status Validate() const;
};

// Returns the preset of this name: "a100_pcie4", "h100_pcie5", "b200_pcie5", "gh200_c2c",
// "gb200_c2c". NotFound lists the names.
absl::StatusOr<DevicePreset> FindPreset(const std::string& name);
std::vector<std::string> PresetNames();

// The properties of a model that decide what offloading costs. Both are positive and finite.
struct Workload {
  double flops_per_saved_byte;  // FLOPs of a training step per byte of saved activations
  double mean_saved_tensor_bytes;
};

// Returns a smaller device on which a small model behaves like a large one on `base`. Relative to a
// tensor's time on the link, these stay the same: its FLOPs, its memory traffic, and the costs per
// tensor (launches, host calls, fixed copy costs). So the small model's step is the large one's,
// shortened by the ratio of tensor sizes.
DevicePreset ScalePreset(const DevicePreset& base, const Workload& large, const Workload& small);

// Returns the modelled milliseconds of a kernel. Both numbers must be finite and at least 0.
double KernelMs(const DevicePreset& preset, double flops, double memory_bytes, ComputeType type);

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_COST_MODEL_H_
