// Checks that the checksum detects changed, moved and missing bytes at any size and alignment.

#include "pinion/hooks/autograd/tensor_checksum.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// The formula of the header in plain unsigned arithmetic.
uint64_t Reference(const Bytes& bytes) {
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<size_t>(8, bytes.size() - i));
    uint64_t mixed = i / 8 * 0x9E3779B97F4A7C15 + word;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    sum += mixed ^ (mixed >> 31);
  }
  return sum;
}

// Returns the checksum of `bytes` stored at `offset` in a storage on `device`.
uint64_t ChecksumOn(c10::Device device, const Bytes& bytes, size_t offset) {
  at::Tensor host = at::empty({static_cast<int64_t>(offset + bytes.size() + 3)}, at::kByte);
  host.fill_(0xA5);
  std::copy(bytes.begin(), bytes.end(), host.mutable_data_ptr<uint8_t>() + offset);
  const at::Tensor tensor = host.to(device);
  return TensorChecksum::Of(tensor.storage(), {offset, offset + bytes.size()}).value();
}

uint64_t Checksum(const Bytes& bytes) { return ChecksumOn(at::kCPU, bytes, 0); }

TEST(TensorChecksumTest, EverySizeAndPlaceGivesTheSumOfTheHeader) {
  for (const size_t size : {0, 1, 7, 8, 9, 63, 64, 65, 1000, 4096}) {
    const Bytes bytes = RandomBytes(size, size);
    for (const size_t offset : {0, 1, 2, 4, 7, 8, 512}) {
      EXPECT_EQ(ChecksumOn(at::kCPU, bytes, offset), Reference(bytes)) << size << " at " << offset;
    }
  }
}

// Foreign memory may be unaligned, so words can begin at any address.
TEST(TensorChecksumTest, AStorageMayBeginAtAnyAddress) {
  const Bytes bytes = RandomBytes(64, 5);
  for (size_t begin = 0; begin < 8; ++begin) {
    for (size_t offset = 0; offset < 8; ++offset) {
      std::vector<uint64_t> memory(2 + bytes.size() / 8);
      uint8_t* const data = reinterpret_cast<uint8_t*>(memory.data()) + begin;
      std::copy(bytes.begin(), bytes.end(), data + offset);
      const size_t end = offset + bytes.size();
      const at::Tensor tensor = at::from_blob(data, {static_cast<int64_t>(end)}, at::kByte);
      EXPECT_EQ(TensorChecksum::Of(tensor.storage(), {offset, end}).value(), Reference(bytes))
          << begin << " and " << offset;
    }
  }
}

class TensorChecksumKernels : public ::testing::Test {
 protected:
  // Returns how many kernels read so many bytes of the device.
  uint64_t KernelsFor(uint64_t begin, uint64_t size) {
    EXPECT_TRUE(world_.Synchronize().ok());
    const uint64_t before = world_.machine().time_stats(0).kernels;
    TensorChecksum::Of(tensor_.storage(), {begin, begin + size});
    EXPECT_TRUE(world_.Synchronize().ok());
    return world_.machine().time_stats(0).kernels - before;
  }

  static constexpr uint64_t kChunk = 4 << 20;
  testing::EmuWorld world_;
  const at::Tensor tensor_ =
      at::zeros({2 * kChunk}, at::TensorOptions(at::kByte).device(world_.device()));
};

TEST_F(TensorChecksumKernels, WholeWordsAreReadWhereTheyAre) {
  EXPECT_LT(KernelsFor(8, 1024), KernelsFor(9, 1024)) << "which are put together first";
}

TEST_F(TensorChecksumKernels, WholeChunksTakeNoKernelMoreThanWhatIsALittleLess) {
  EXPECT_EQ(KernelsFor(0, kChunk), KernelsFor(0, kChunk - 8));
  EXPECT_EQ(KernelsFor(0, 2 * kChunk), KernelsFor(0, 2 * kChunk - 8));
}

TEST(TensorChecksumTest, BytesOfSeveralChunksHaveOneSum) {
  const Bytes bytes = RandomBytes((size_t{9} << 20) + 5, 1);
  EXPECT_EQ(Checksum(bytes), Reference(bytes));
}

TEST(TensorChecksumTest, EveryBitThatChangesIsFound) {
  Bytes bytes = RandomBytes(67, 2);
  const uint64_t before = Checksum(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= 1 << bit % 8;
    EXPECT_NE(Checksum(bytes), before) << "bit " << bit;
    bytes[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_EQ(Checksum(bytes), before);
}

TEST(TensorChecksumTest, ElementsThatChangePlacesAreFound) {
  const Bytes bytes = RandomBytes(256, 3);
  const uint64_t before = Checksum(bytes);
  for (const size_t element : {1, 2, 4, 8, 16}) {
    for (size_t i = 0; i + element < bytes.size(); i += element) {
      Bytes swapped = bytes;
      std::swap_ranges(swapped.begin() + i, swapped.begin() + i + element, swapped.end() - element);
      if (swapped == bytes) continue;
      EXPECT_NE(Checksum(swapped), before) << element << " bytes at " << i;
    }
  }
}

// A sum of position times value would miss these: the difference is 2^63 times an even number.
TEST(TensorChecksumTest, SwappedSignBitsAreFound) {
  Bytes bytes(64, 0);
  bytes[7] = 0x80;
  Bytes swapped(64, 0);
  swapped[23] = 0x80;
  EXPECT_NE(Checksum(bytes), Checksum(swapped));
}

TEST(TensorChecksumTest, ShiftedMissingAndRepeatedBytesAreFound) {
  const Bytes bytes = RandomBytes(4096, 4);
  const uint64_t before = Checksum(bytes);
  for (const size_t by : {1, 2, 4, 8, 512}) {
    Bytes rotated = bytes;
    std::rotate(rotated.begin(), rotated.begin() + by, rotated.end());
    EXPECT_NE(Checksum(rotated), before) << "rotated by " << by;
    Bytes zeroed = bytes;
    std::fill_n(zeroed.end() - by, by, 0);
    EXPECT_NE(Checksum(zeroed), before) << "the last " << by << " missing";
    Bytes repeated = bytes;
    std::copy_n(repeated.begin(), by, repeated.begin() + by);
    EXPECT_NE(Checksum(repeated), before) << "the first " << by << " twice";
  }
}

TEST(TensorChecksumTest, NothingHasNoValue) {
  EXPECT_FALSE(TensorChecksum());
  EXPECT_THROW(TensorChecksum().value(), c10::Error);
}

}  // namespace
}  // namespace pinion
