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

TEST_F(PciLinkTest, GenerationAndLanesAreReadAndRatesAreThoseAfterTheLineCode) {
  const struct {
    const char* speed;
    const char* width;
    int generation;
    double gb_per_s;
  } rows[] = {{"2.5 GT/s PCIe", "1", 1, 0.25},   {"8.0 GT/s PCIe", "16", 3, 15.75},
              {"16.0 GT/s PCIe", "16", 4, 31.5}, {"32.0 GT/s PCIe", "8", 5, 31.5},
              {"32.0 GT/s PCIe", "16", 5, 63},   {"64.0 GT/s PCIe", "16", 6, 128}};
  for (const auto& [speed, width, generation, gb_per_s] : rows) {
    SCOPED_TRACE(std::string(speed) + " x" + width);
    const PciLink link = Read(speed, width);
    EXPECT_EQ(link.generation, generation);
    EXPECT_EQ(std::to_string(link.lanes), width);
    EXPECT_NEAR(link.gb_per_s / gb_per_s, 1, 0.001);
  }
}

void ExpectUnknown(const PciLink& link) {
  EXPECT_EQ(link.generation, 0);
  EXPECT_EQ(link.gb_per_s, 0);
  EXPECT_EQ(link.numa_node, -1);
}

TEST_F(PciLinkTest, WhatSysfsDoesNotKnowStaysUnknown) {
  ExpectUnknown(PciLink());
  EXPECT_EQ(PciLink().lanes, 0);
  ExpectUnknown(Read());  // no such device
  EXPECT_EQ(Read().lanes, 0);
  Write("numa_node", "unknown");
  ExpectUnknown(Read("48.0 GT/s PCIe", "16"));  // no generation has this speed
  ExpectUnknown(Read("Unknown", "255"));
  EXPECT_EQ(Read("Unknown", "255").lanes, 0);
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

TEST_F(PciPathTest, TheLinkIsTheSlowestOfTheDeviceAndTheBridgesThatCount) {
  const struct {
    const char* what;
    std::vector<std::pair<std::string, std::string>> bridges;
    double gb_per_s;
    const char* lanes_in_use = "16";
  } rows[] = {
      {"a narrower slot", {{"32.0 GT/s PCIe", "8"}}, 31.5, "8"},
      {"an older slot", {{"16.0 GT/s PCIe", "16"}}, 31.5},
      {"the narrowest of two", {{"32.0 GT/s PCIe", "16"}, {"16.0 GT/s PCIe", "8"}}, 15.75},
      {"a better slot", {{"64.0 GT/s PCIe", "16"}}, 63},
      {"a slow port of a virtual machine", {{"2.5 GT/s PCIe", "1"}}, 63},
      {"a wide port of a virtual machine", {{"16.0 GT/s PCIe", "32"}}, 63},
      {"no path beyond an unknown one", {{"Unknown", "255"}, {"2.5 GT/s PCIe", "1"}}, 63},
  };
  for (const auto& [what, bridges, gb_per_s, lanes_in_use] : rows) {
    EXPECT_NEAR(ReadBelow(bridges, lanes_in_use).gb_per_s, gb_per_s, 0.05) << what;
  }
  const PciLink older = ReadBelow({{"16.0 GT/s PCIe", "16"}});
  EXPECT_EQ(older.generation, 4);
  EXPECT_EQ(older.lanes, 16);
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
