// The PCIe link of a device, as sysfs tells.

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

// `bus_id` as CUDA prints it ("0000:C1:00.0"); `devices` is /sys/bus/pci/devices, tests inject
// another. The least that the device, its slot and the bridges above can do. The link's present
// speed is not read, because an idle link slows down. The ports of virtual machines, which make
// their figures up, do not count: those with fewer lanes than the device uses, or with more than
// 16. What cannot be read stays unknown.
PciLink ReadPciLink(const std::string& bus_id, const std::string& devices = "/sys/bus/pci/devices");

// The same for CUDA's device `index`. All is unknown where CUDA does not tell its address.
PciLink PciLinkOf(const CudaApi& api, int index,
                  const std::string& devices = "/sys/bus/pci/devices");

// Adds what is known of the PCIe link to what is known of a device. A link that is known already
// is another one.
void AddPciLink(const PciLink& pci, DeviceInfo* info);

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_PCI_LINK_H_
