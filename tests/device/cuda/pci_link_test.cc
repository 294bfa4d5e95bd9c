#include "pinion/device/cuda/pci_link.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace pinion {
namespace {

// A fake of /sys/bus/pci/devices.
class PciLinkTest : public ::testing::Test {
 protected:
  PciLinkTest() : root_(std::filesystem::path(::testing::TempDir()) / "pci_link_test_XXXXXX") {
    std::string pattern = root_.string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  ~PciLinkTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories(root_ / "0000:c1:00.0");
    std::ofstream(root_ / "0000:c1:00.0" / file) << text << "\n";
  }
  PciLink Read(const std::string& speed, const std::string& width) {
    Write("max_link_speed", speed);
    Write("max_link_width", width);
    return Read();
  }
  // CUDA prints the address in upper case; sysfs uses lower case.
  PciLink Read() const { return ReadPciLink("0000:C1:00.0", root_.string()); }

  std::filesystem::path root_;
};

TEST_F(PciLinkTest, RatesAreThoseAfterTheLineCode) {
  EXPECT_NEAR(Read("16.0 GT/s PCIe", "16").gb_per_s, 31.5, 0.05);
  EXPECT_NEAR(Read("32.0 GT/s PCIe", "16").gb_per_s, 63.0, 0.05);
  EXPECT_NEAR(Read("32.0 GT/s PCIe", "8").gb_per_s, 31.5, 0.05);
  EXPECT_NEAR(Read("8.0 GT/s PCIe", "16").gb_per_s, 15.75, 0.05);
  EXPECT_NEAR(Read("64.0 GT/s PCIe", "16").gb_per_s, 128, 0.5);
  EXPECT_NEAR(Read("2.5 GT/s PCIe", "1").gb_per_s, 0.25, 0.001);
}

TEST_F(PciLinkTest, GenerationAndLanesAreReadAsTheyAre) {
  const PciLink link = Read("32.0 GT/s PCIe", "16");
  EXPECT_EQ(link.generation, 5);
  EXPECT_EQ(link.lanes, 16);
}

TEST_F(PciLinkTest, WhatTheKernelDoesNotKnowStaysUnknown) {
  Write("numa_node", "unknown");
  const PciLink link = Read("Unknown", "255");
  EXPECT_EQ(link.numa_node, -1);
  EXPECT_EQ(link.generation, 0);
  EXPECT_EQ(link.lanes, 0);
  EXPECT_EQ(link.gb_per_s, 0);
}

TEST_F(PciLinkTest, ASpeedThatNoGenerationHasIsUnknown) {
  const PciLink link = Read("48.0 GT/s PCIe", "16");
  EXPECT_EQ(link.generation, 0);
  EXPECT_EQ(link.gb_per_s, 0);
}

TEST_F(PciLinkTest, ADeviceThatSysfsDoesNotHaveIsUnknown) {
  const PciLink link = Read();
  EXPECT_EQ(link.generation, 0);
  EXPECT_EQ(link.lanes, 0);
  EXPECT_EQ(link.gb_per_s, 0);
  EXPECT_EQ(link.numa_node, -1);
  EXPECT_EQ(PciLink().numa_node, -1);
}

TEST_F(PciLinkTest, TheNodeIsReadWhereThereIsOne) {
  Write("numa_node", "1");
  EXPECT_EQ(Read().numa_node, 1);
  Write("numa_node", "-1");
  EXPECT_EQ(Read().numa_node, -1);
  Write("numa_node", "");
  EXPECT_EQ(Read().numa_node, -1);
}

// Writes the bridges above the device, nearest first. In sysfs the device's entry links into the
// tree of bridges.
class PciPathTest : public PciLinkTest {
 protected:
  PciLink ReadBelow(const std::vector<std::pair<std::string, std::string>>& bridges,
                    const std::string& lanes_in_use = "16") {
    std::filesystem::remove_all(root_ / "tree");
    std::filesystem::remove_all(root_ / "0000:c1:00.0");
    std::filesystem::path folder = root_ / "tree";
    std::filesystem::create_directories(folder);
    for (size_t i = bridges.size(); i-- > 0;) {
      folder /= "bridge" + std::to_string(i);
      std::filesystem::create_directories(folder);
      std::ofstream(folder / "max_link_speed") << bridges[i].first << "\n";
      std::ofstream(folder / "max_link_width") << bridges[i].second << "\n";
    }
    std::filesystem::create_directories(folder / "0000:c1:00.0");
    std::filesystem::create_directory_symlink(folder / "0000:c1:00.0", root_ / "0000:c1:00.0");
    Write("current_link_width", lanes_in_use);
    return Read("32.0 GT/s PCIe", "16");
  }
};

TEST_F(PciPathTest, ANarrowerOrOlderSlotIsTheLink) {
  EXPECT_NEAR(ReadBelow({{"32.0 GT/s PCIe", "8"}}, "8").gb_per_s, 31.5, 0.05);
  const PciLink older = ReadBelow({{"16.0 GT/s PCIe", "16"}});
  EXPECT_EQ(older.generation, 4);
  EXPECT_EQ(older.lanes, 16);
  EXPECT_NEAR(older.gb_per_s, 31.5, 0.05);
}

TEST_F(PciPathTest, TheNarrowestOfAllBridgesIsTheLink) {
  EXPECT_NEAR(ReadBelow({{"32.0 GT/s PCIe", "16"}, {"16.0 GT/s PCIe", "8"}}).gb_per_s, 15.75, 0.05);
}

TEST_F(PciPathTest, ABetterSlotMakesTheDeviceNoFaster) {
  EXPECT_NEAR(ReadBelow({{"64.0 GT/s PCIe", "16"}}).gb_per_s, 63, 0.05);
}

TEST_F(PciPathTest, ThePortsOfVirtualMachinesDoNotCount) {
  EXPECT_NEAR(ReadBelow({{"2.5 GT/s PCIe", "1"}}).gb_per_s, 63, 0.05);
  EXPECT_NEAR(ReadBelow({{"16.0 GT/s PCIe", "32"}}).gb_per_s, 63, 0.05);
}

TEST_F(PciPathTest, ABridgeThatTellsNothingEndsThePath) {
  EXPECT_NEAR(ReadBelow({{"Unknown", "255"}, {"2.5 GT/s PCIe", "1"}}).gb_per_s, 63, 0.05);
}

TEST_F(PciLinkTest, ADevicesLinkIsPcieUnlessItIsAnotherOneAlready) {
  const PciLink pci = {.generation = 5, .lanes = 16, .gb_per_s = 63, .numa_node = 3};
  DeviceInfo info;
  AddPciLink({.numa_node = 2}, &info);
  EXPECT_EQ(info.link, LinkKind::kUnknown);
  EXPECT_EQ(info.numa_node, 2);
  AddPciLink(pci, &info);
  EXPECT_EQ(info.link, LinkKind::kPcie);
  EXPECT_EQ(info.link_name, "PCIe 5 x16");
  EXPECT_EQ(info.rated_gb_per_s, 63);
  info.link = LinkKind::kNvlinkC2c;
  info.link_name = "NVLink-C2C";
  info.rated_gb_per_s = 450;
  AddPciLink(pci, &info);
  EXPECT_EQ(info.link, LinkKind::kNvlinkC2c);
  EXPECT_EQ(info.link_name, "NVLink-C2C");
  EXPECT_EQ(info.rated_gb_per_s, 450);
  EXPECT_EQ(info.numa_node, 3);
}

}  // namespace
}  // namespace pinion
