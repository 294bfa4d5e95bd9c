// RamProbe's percentage against psutil itself, which TRL and others ask.

#include <cstdint>
#include <cstdio>
#include <random>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;

std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  char buffer[256];
  while (fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
  pclose(pipe);
  return output;
}

// One line per host: total, available, percent.
std::string Psutil(const std::string& roots) {
  return OutputOf(
      "python3 -c 'import psutil, sys\n"
      "for root in sys.argv[1:]:\n"
      "  psutil.PROCFS_PATH = root + \"/proc\"\n"
      "  m = psutil.virtual_memory()\n"
      "  print(m.total, m.available, m.percent)' " +
      roots + " 2>/dev/null");
}

TEST(PsutilTest, TotalAvailableAndPercentAreWhatPsutilSays) {
  if (OutputOf("python3 -c 'import psutil; print(1)' 2>/dev/null") != "1\n") {
    GTEST_SKIP() << "python3-psutil is not installed";
  }
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  FakeHost hosts[40];
  std::string roots;
  for (FakeHost& host : hosts) {
    const uint64_t total_kib = 1 + random() % (uint64_t{1} << (10 + random() % 22));
    // Some kernels in containers report more than there is.
    const uint64_t available_kib = 1 + random() % (random() % 8 == 0 ? 2 * total_kib : total_kib);
    const uint64_t free_kib = random() % total_kib;
    std::ostringstream text;
    text << "MemTotal: " << total_kib << " kB\nMemFree: " << free_kib
         << " kB\nMemAvailable: " << available_kib << " kB\nBuffers: 10 kB\nCached: 20 kB\n"
         << "SReclaimable: 5 kB\nShmem: 1 kB\nActive: 3 kB\nInactive: 4 kB\nSlab: 6 kB\n";
    host.Write("proc/meminfo", text.str());
    roots += " " + host.root().string();
  }
  std::istringstream lines(Psutil(roots));
  for (FakeHost& host : hosts) {
    uint64_t total = 0;
    uint64_t available = 0;
    double percent = -1;
    ASSERT_TRUE(lines >> total >> available >> percent);
    const RamSample sample = host.Probe().Sample();
    EXPECT_EQ(sample.total_bytes, total);
    EXPECT_EQ(sample.available_bytes, available);
    EXPECT_EQ(sample.percent, percent) << available << " of " << total;
  }
}

}  // namespace
}  // namespace pinion
