#include "pinion/device/cuda/pci_link.h"

#include <algorithm>
#include <array>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "pinion/device/cuda/cuda_calls.h"

namespace pinion {
namespace {

constexpr int kUnknownWidth = 255;  // the kernel's PCIE_LNK_WIDTH_UNKNOWN

struct Generation {
  double gt_per_s;     // as sysfs prints it
  double gb_per_lane;  // after 8b/10b (1, 2) or 128b/130b (3 to 5); 6 sends flits
};

constexpr std::array<Generation, 6> kGenerations = {{
    {2.5, 0.25},
    {5.0, 0.5},
    {8.0, 8.0 / 8 * 128 / 130},
    {16.0, 16.0 / 8 * 128 / 130},
    {32.0, 32.0 / 8 * 128 / 130},
    {64.0, 64.0 / 8},
}};

constexpr int kMostLanes = 16;  // widest existing slot

// Reads a lane count from the device's folder; 0 if unknown.
int ReadLanes(const std::string& folder, const char* file) {
  int lanes = 0;
  std::ifstream(folder + file) >> lanes;
  return lanes == kUnknownWidth ? 0 : lanes;
}

// Reads the PCIe generation; 0 if the kernel reports none or an unknown speed.
int ReadGeneration(const std::string& folder) {
  double gt_per_s = 0;  // "32.0 GT/s PCIe"
  std::ifstream(folder + "max_link_speed") >> gt_per_s;
  for (size_t i = 0; i < kGenerations.size(); ++i) {
    if (kGenerations[i].gt_per_s == gt_per_s) return static_cast<int>(i) + 1;
  }
  return 0;
}

}  // namespace

PciLink ReadPciLink(const std::string& bus_id, const std::string& devices) {
  // sysfs writes the address in lower case.
  const std::string folder = absl::StrCat(devices, "/", absl::AsciiStrToLower(bus_id), "/");
  PciLink link;
  std::ifstream node(folder + "numa_node");
  if (!(node >> link.numa_node)) link.numa_node = -1;
  link.generation = ReadGeneration(folder);
  link.lanes = ReadLanes(folder, "max_link_width");
  if (link.generation == 0) return link;
  // The folder is a symbolic link into the bridge's folder.
  const int lanes_in_use = ReadLanes(folder, "current_link_width");
  for (std::string bridge = folder + "../";; bridge += "../") {
    const int generation = ReadGeneration(bridge);
    const int lanes = ReadLanes(bridge, "max_link_width");
    const bool is_made_up =
        lanes > kMostLanes || (bridge == folder + "../" && lanes < lanes_in_use);
    if (generation == 0 || lanes == 0 || is_made_up) break;
    link.generation = std::min(link.generation, generation);
    link.lanes = std::min(link.lanes, lanes);
  }
  link.gb_per_s = kGenerations[link.generation - 1].gb_per_lane * link.lanes;
  return link;
}

PciLink PciLinkOf(const CudaApi& api, int index, const std::string& devices) {
  char bus_id[32] = {};
  const absl::Status asked = CudaStatus(api, api.DeviceGetPCIBusId(bus_id, sizeof(bus_id), index),
                                        "cudaDeviceGetPCIBusId");
  return asked.ok() ? ReadPciLink(bus_id, devices) : PciLink();
}

void AddPciLink(const PciLink& pci, DeviceInfo* info) {
  info->numa_node = pci.numa_node;
  if (info->link != LinkKind::kUnknown || pci.gb_per_s == 0) return;
  info->link = LinkKind::kPcie;
  info->link_name = absl::StrCat("PCIe ", pci.generation, " x", pci.lanes);
  info->rated_gb_per_s = pci.gb_per_s;
}

}  // namespace pinion
