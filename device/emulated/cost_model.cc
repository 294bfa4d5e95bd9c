#include "pinion/device/emulated/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

struct PresetConstants {
  const char* name;
  const char* description;
  LinkKind link;
  const char* link_name;
  double rated;
  double float32_tflop_per_s, bfloat16_tflop_per_s, float64_tflop_per_s;
  double memory_gb_per_s;
  double pin_ms_per_gib;
  double host_memory;  // GB/s
  double h2d, d2h, h2d_duplex, d2h_duplex, host, pageable;
};

// FLOP/s are half of the data sheet's dense peak, because training reaches 40 to 50 % model FLOPs
// utilisation. float32 is without TF32, LibTorch's default. Memory bandwidth is the data sheet's.
// Host memory is the bandwidth of one socket of a DGX or superchip, times 0.8 for a triad. NVIDIA's
// Grace tuning guide expects 410 of 512 GB/s; x86 is assumed to reach the same fraction. Links are
// copy-engine measurements in GB/s, from public reports:
constexpr std::array<PresetConstants, 5> kPresets = {{
    {
        .name = "a100_pcie4",
        .description = "A100 80 GB on PCIe 4 x16",
        .link = LinkKind::kPcie,
        .link_name = "PCIe 4 x16",
        .rated = 31.5,
        .float32_tflop_per_s = 9.75,    // 19.5
        .bfloat16_tflop_per_s = 156.0,  // 312
        .float64_tflop_per_s = 9.75,    // 19.5 with tensor cores
        .memory_gb_per_s = 1935,
        .pin_ms_per_gib = 590,  // llama.cpp#28223: 101.7 GiB in 60 s
        .host_memory = 164,     // EPYC 7742, 8 x DDR4-3200: 204.8
        .h2d = 26.3,            // nvbandwidth#15: the best of PCIe 4 x16
        .d2h = 27.1,            // nvbandwidth#15
        .h2d_duplex = 12.0,     // nvbandwidth#11, #53: 11 to 13 beside D2H, on A100 hosts
        .d2h_duplex = 24.5,     // nvbandwidth#11, #53: 24 to 25
        .host = 0,              // no measurement of a limit
        .pageable = 6.5,        // assumed: half of what PCIe 5 reaches
    },
    {
        .name = "h100_pcie5",
        .description = "H100 80 GB HBM3 on PCIe 5 x16",
        .link = LinkKind::kPcie,
        .link_name = "PCIe 5 x16",
        .rated = 63.0,
        .float32_tflop_per_s = 33.5,    // 67
        .bfloat16_tflop_per_s = 494.5,  // 989
        .float64_tflop_per_s = 33.5,    // 67 with tensor cores
        .memory_gb_per_s = 3350,
        .pin_ms_per_gib = 380,  // lupine#323: 256 MiB in 95 ms; cudf#15665: 0.3 s per GB
        .host_memory = 246,     // Xeon 8480C, 8 x DDR5-4800: 307.2
        .h2d = 55.6,            // nvbandwidth 0.10 log, PCIe 5 x16
        .d2h = 57.3,            // the same log
        .h2d_duplex = 51.9,     // the same log
        .d2h_duplex = 49.1,     // the same log
        .host = 0,
        .pageable = 13.0,  // DeepSpeed#8283: 10 to 17 on H200
    },
    {
        .name = "b200_pcie5",
        .description = "B200 on PCIe 5 x16",
        .link = LinkKind::kPcie,
        .link_name = "PCIe 5 x16",
        .rated = 63.0,
        .float32_tflop_per_s = 37.5,     // 75
        .bfloat16_tflop_per_s = 1125.0,  // 2250
        .float64_tflop_per_s = 18.5,     // 37
        .memory_gb_per_s = 8000,
        .pin_ms_per_gib = 380,  // as h100_pcie5
        .host_memory = 287,     // Xeon 8570, 8 x DDR5-5600: 358.4
        .h2d = 55.6,            // the link is h100_pcie5's
        .d2h = 57.3,
        .h2d_duplex = 51.9,
        .d2h_duplex = 49.1,
        .host = 0,
        .pageable = 13.0,
    },
    {
        .name = "gh200_c2c",
        .description = "GH200 96 GB on NVLink-C2C, one superchip",
        .link = LinkKind::kNvlinkC2c,
        .link_name = "NVLink-C2C",
        .rated = 450,
        .float32_tflop_per_s = 33.5,    // 67
        .bfloat16_tflop_per_s = 494.5,  // 989
        .float64_tflop_per_s = 33.5,    // 67
        .memory_gb_per_s = 4000,
        .pin_ms_per_gib = 380,  // as h100_pcie5: no measurement
        .host_memory = 410,     // Grace, LPDDR5X: 512
        .h2d = 375,             // single-superchip study, 2024 (450 is the link's limit)
        .d2h = 297,             // the same study; nvbandwidth#23 agrees that D2H is the slow way
        .h2d_duplex = 187,      // nvbandwidth#41: about half of the peak with both directions busy
        .d2h_duplex = 148,      // nvbandwidth#41
        .host = 0,
        .pageable = 13.0,  // as h100_pcie5: no measurement
    },
    {
        .name = "gb200_c2c",
        .description = "GB200 on NVLink-C2C, two GPUs per Grace",
        .link = LinkKind::kNvlinkC2c,
        .link_name = "NVLink-C2C",
        .rated = 225,
        .float32_tflop_per_s = 40.0,     // 80
        .bfloat16_tflop_per_s = 1250.0,  // 2500
        .float64_tflop_per_s = 20.0,     // 40
        .memory_gb_per_s = 8000,
        .pin_ms_per_gib = 380,  // as h100_pcie5: no measurement
        .host_memory = 410,     // as gh200_c2c
        .h2d = 211.5,           // Megatron-LM#6491, GB300: the same Grace and the same 225 limit
        .d2h = 193.5,           // Megatron-LM#6491; sglang#40278 agrees (210 / 192)
        .h2d_duplex = 105.7,    // assumed: half, as GH200
        .d2h_duplex = 96.7,     // assumed: half, as GH200
        .host = 688,            // Megatron-LM#6491: four devices together reach 4 x 172
        .pageable = 13.0,       // as h100_pcie5: no measurement
    },
}};

constexpr double kFixedUs = 3.0;      // H200, 4 against 256 MiB copies (DeepSpeed#8283): 3.1
constexpr double kPieceUs = 1.0;      // vLLM#42212: 4 KiB pieces of a batch at 3.8 GB/s
constexpr double kLaunchUs = 2.0;     // assumed: the gap between small kernels
constexpr double kHostCallUs = 2.5;   // FlexKV#193 and an A10 profile: cudaMemcpyAsync 2.3 to 2.6
constexpr double kHostEventUs = 1.0;  // assumed: event calls are of the order of 1 us

void Fill(const PresetConstants& constants, DevicePreset& preset) {
  preset.name = constants.name;
  preset.description = std::string(constants.description) + " (modelled)";
  preset.float32_tflop_per_s = constants.float32_tflop_per_s;
  preset.bfloat16_tflop_per_s = constants.bfloat16_tflop_per_s;
  preset.float64_tflop_per_s = constants.float64_tflop_per_s;
  preset.memory_gb_per_s = constants.memory_gb_per_s;
  preset.launch_us = kLaunchUs;
  preset.host_call_us = kHostCallUs;
  preset.host_event_us = kHostEventUs;
  preset.pin_ms_per_gib = constants.pin_ms_per_gib;
  preset.host_memory_gb_per_s = constants.host_memory;
  preset.link = {
      .kind = constants.link,
      .name = constants.link_name,
      .rated_gb_per_s = constants.rated,
      .h2d_gb_per_s = constants.h2d,
      .d2h_gb_per_s = constants.d2h,
      .h2d_duplex_gb_per_s = constants.h2d_duplex,
      .d2h_duplex_gb_per_s = constants.d2h_duplex,
      .host_gb_per_s = constants.host,
      .fixed_us = kFixedUs,
      .piece_us = kPieceUs,
      .pageable_gb_per_s = constants.pageable,
  };
}

double PeakFlopPerMs(const DevicePreset& preset, ComputeType type) {
  const double tflop_per_s = type == ComputeType::kBFloat16  ? preset.bfloat16_tflop_per_s
                             : type == ComputeType::kFloat64 ? preset.float64_tflop_per_s
                                                             : preset.float32_tflop_per_s;
  return tflop_per_s * 1e9;
}

}  // namespace

DevicePreset::DevicePreset() { Fill(kPresets[1], *this); }

absl::Status DevicePreset::Validate() const {
  const struct {
    const char* field;
    double value;
    bool may_be_zero;
  } fields[] = {
      {"float32_tflop_per_s", float32_tflop_per_s, false},
      {"bfloat16_tflop_per_s", bfloat16_tflop_per_s, false},
      {"float64_tflop_per_s", float64_tflop_per_s, false},
      {"memory_gb_per_s", memory_gb_per_s, false},
      {"launch_us", launch_us, true},
      {"host_call_us", host_call_us, true},
      {"host_event_us", host_event_us, true},
      {"pin_ms_per_gib", pin_ms_per_gib, true},
      {"host_memory_gb_per_s", host_memory_gb_per_s, false},
      {"link.rated_gb_per_s", link.rated_gb_per_s, true},
      {"link.h2d_gb_per_s", link.h2d_gb_per_s, false},
      {"link.d2h_gb_per_s", link.d2h_gb_per_s, false},
      {"link.h2d_duplex_gb_per_s", link.h2d_duplex_gb_per_s, false},
      {"link.d2h_duplex_gb_per_s", link.d2h_duplex_gb_per_s, false},
      {"link.host_gb_per_s", link.host_gb_per_s, true},
      {"link.fixed_us", link.fixed_us, true},
      {"link.piece_us", link.piece_us, true},
      {"link.pageable_gb_per_s", link.pageable_gb_per_s, false},
  };
  for (const auto& [field, value, may_be_zero] : fields) {
    if (std::isfinite(value) && (value > 0 || (may_be_zero && value == 0))) continue;
    return absl::InvalidArgumentError("preset " + name + ": " + field + " is " +
                                      std::to_string(value) + "; it must be finite and " +
                                      (may_be_zero ? "at least 0" : "positive"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DevicePreset> FindPreset(const std::string& name) {
  std::string known;
  for (const PresetConstants& constants : kPresets) {
    if (name == constants.name) {
      DevicePreset preset;
      Fill(constants, preset);
      return preset;
    }
    known += std::string(known.empty() ? "" : ", ") + constants.name;
  }
  return absl::NotFoundError("no preset \"" + name + "\"; there are: " + known);
}

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (const PresetConstants& constants : kPresets) names.push_back(constants.name);
  return names;
}

DevicePreset ScalePreset(const DevicePreset& base, const Workload& large, const Workload& small) {
  for (const Workload& workload : {large, small}) {
    const double flops = workload.flops_per_saved_byte, bytes = workload.mean_saved_tensor_bytes;
    PINION_CHECK(flops > 0 && bytes > 0 && std::isfinite(flops) && std::isfinite(bytes))
        << "ScalePreset: a Workload has flops_per_saved_byte " << flops
        << " and mean_saved_tensor_bytes " << bytes << "; both must be positive and finite";
  }
  // The link and both memories keep their bandwidths, so a byte costs the same. FLOPs per byte
  // shrink, and with them the peaks; tensors shrink, and with them all costs per tensor.
  const double flops = small.flops_per_saved_byte / large.flops_per_saved_byte;
  const double fixed = small.mean_saved_tensor_bytes / large.mean_saved_tensor_bytes;
  DevicePreset scaled = base;
  scaled.name = base.name + "_scaled";
  scaled.description = base.description + ", scaled to a small model";
  scaled.float32_tflop_per_s *= flops;
  scaled.bfloat16_tflop_per_s *= flops;
  scaled.float64_tflop_per_s *= flops;
  scaled.launch_us *= fixed;
  scaled.host_call_us *= fixed;
  scaled.host_event_us *= fixed;
  scaled.link.fixed_us *= fixed;
  scaled.link.piece_us *= fixed;
  return scaled;
}

double KernelMs(const DevicePreset& preset, double flops, double memory_bytes, ComputeType type) {
  PINION_CHECK(flops >= 0 && memory_bytes >= 0 && std::isfinite(flops) &&
               std::isfinite(memory_bytes))
      << "KernelMs: a kernel has " << flops << " flops and " << memory_bytes
      << " memory_bytes; both must be finite and at least 0";
  return preset.launch_us * 1e-3 + std::max(flops / PeakFlopPerMs(preset, type),
                                            memory_bytes / (preset.memory_gb_per_s * 1e6));
}

}  // namespace pinion
