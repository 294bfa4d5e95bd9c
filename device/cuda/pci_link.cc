#include "pinion/device/cuda/pci_link.h"

#include <array>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

constexpr int kUnknownWidth = 255;  // PCIE_LNK_WIDTH_UNKNOWN of the kernel

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

}  // namespace

PciLink ReadPciLink(const std::string& bus_id, const std::string& devices) {
  // sysfs writes the same address in lower case.
  const std::string folder = absl::StrCat(devices, "/", absl::AsciiStrToLower(bus_id), "/");
  PciLink link;
  double gt_per_s = 0;  // "32.0 GT/s PCIe"
  std::ifstream(folder + "max_link_speed") >> gt_per_s;
  std::ifstream(folder + "max_link_width") >> link.lanes;
  if (link.lanes == kUnknownWidth) link.lanes = 0;
  std::ifstream node(folder + "numa_node");
  if (!(node >> link.numa_node)) link.numa_node = -1;
  for (size_t i = 0; i < kGenerations.size(); ++i) {
    if (kGenerations[i].gt_per_s != gt_per_s) continue;
    link.generation = static_cast<int>(i) + 1;
    link.gb_per_s = kGenerations[i].gb_per_lane * link.lanes;
  }
  return link;
}

void AddPciLink(const PciLink& pci, DeviceInfo* info) {
  info->numa_node = pci.numa_node;
  if (info->link != LinkKind::kUnknown || pci.gb_per_s == 0) return;
  info->link = LinkKind::kPcie;
  info->link_name = absl::StrCat("PCIe ", pci.generation, " x", pci.lanes);
  info->rated_gb_per_s = pci.gb_per_s;
}

}  // namespace pinion
