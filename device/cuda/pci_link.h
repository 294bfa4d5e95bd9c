// The PCIe link of a device, as sysfs tells.

#ifndef PINION_DEVICE_CUDA_PCI_LINK_H_
#define PINION_DEVICE_CUDA_PCI_LINK_H_

#include <string>

#include "pinion/device/device.h"

namespace pinion {

struct PciLink {
  int generation = 0;   // 0: unknown
  int lanes = 0;        // 0: unknown
  double gb_per_s = 0;  // raw, per direction, after the line code; 0: unknown
  int numa_node = -1;   // -1: unknown, or a host of one node
};

// `bus_id` as CUDA prints it ("0000:C1:00.0"); `devices` is /sys/bus/pci/devices, tests inject
// another. What the device can do, not what the link does now: an idle one has slowed down. Nor
// what the slot can do, since the ports of virtual machines make their figures up. What cannot be
// read stays unknown.
PciLink ReadPciLink(const std::string& bus_id, const std::string& devices = "/sys/bus/pci/devices");

// Adds what is known of the PCIe link to what is known of a device. A link that is known already
// is another one.
void AddPciLink(const PciLink& pci, DeviceInfo* info);

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_PCI_LINK_H_
