// Reads the generation, width and bandwidth of a device's PCIe link from sysfs.

#ifndef PINION_DEVICE_CUDA_PCI_LINK_H_
#define PINION_DEVICE_CUDA_PCI_LINK_H_

#include <string>

#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"

namespace pinion {

struct PciLink {
  int generation = 0;   // 0: unknown
  int lanes = 0;        // 0: unknown
  double gb_per_s = 0;  // raw, per direction, after the line code; 0: unknown
  int numa_node = -1;   // -1: unknown, or a host of one node
};

// Returns the slowest link among the device, its slot and the bridges above. `bus_id` is CUDA's
// address ("0000:C1:00.0"); `devices` is /sys/bus/pci/devices, and tests inject another. Unreadable
// values stay unknown.
//
// Reads the maximum speed, because an idle link slows down. Ignores virtual machines' ports with
// invented figures: those with fewer lanes than the device uses, or more than 16.
PciLink ReadPciLink(const std::string& bus_id, const std::string& devices = "/sys/bus/pci/devices");

// Returns the link of CUDA's device `index`, or unknown values if CUDA does not report its address.
PciLink PciLinkOf(const CudaApi& api, int index,
                  const std::string& devices = "/sys/bus/pci/devices");

// Adds the NUMA node, and the PCIe link if the device's link is unknown so far.
void AddPciLink(const PciLink& pci, DeviceInfo* info);

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_PCI_LINK_H_
