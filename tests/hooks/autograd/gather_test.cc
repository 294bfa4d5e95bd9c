// Checks copies of many pieces into one block: their bytes, and the elements that kernels use.

#include "pinion/hooks/autograd/gather.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion {
namespace {

using ::pinion::testing::EmuWorld;
using ::testing::ElementsAre;

std::vector<int64_t>& element_bytes() {
  static std::vector<int64_t> bytes;
  return bytes;
}

// Records the element size of each tensor that `_foreach_copy_` reads.
std::unique_ptr<at::ObserverContext> NoteElements(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == "aten::_foreach_copy_") {
    for (const at::Tensor& tensor : function.inputs()[1].toTensorVector()) {
      element_bytes().push_back(tensor.element_size());
    }
  }
  return nullptr;
}

class GatherTest : public ::testing::Test {
 protected:
  GatherTest()
      : stream_(c10::impl::VirtualGuardImpl(world_.device().type()).getStream(world_.device())) {
    element_bytes().clear();
    at::addThreadLocalCallback(at::RecordFunctionCallback(NoteElements).needsInputs(true));
  }
  ~GatherTest() override { at::clearCallbacks(); }

  EmuWorld world_;
  const BoundStream stream_;
};

// A kernel with one-byte elements would read device memory a few bytes at a time.
TEST_F(GatherTest, PiecesGoInElementsOfSixteenBytesWhereSizeAndAddressAllowIt) {
  struct Piece {
    uint64_t begin_bytes;  // in the piece's tensor
    uint64_t size_bytes;
    uint64_t margin_bytes = 0;  // before the piece in the block
  };
  const std::vector<Piece> pieces = {{0, 512}, {0, 7},   {0, 48},    {8, 64},
                                     {16, 16}, {0, 100}, {0, 64, 8}, {0, 64, 32}};
  constexpr uint64_t kPitch = 512;
  std::vector<at::Tensor> on_host;
  std::vector<at::Tensor> on_device;
  std::vector<GatherPiece> gathered;
  for (size_t i = 0; i < pieces.size(); ++i) {
    on_host.push_back(at::arange(1024, at::kLong)
                          .mul(31)
                          .add(static_cast<int64_t>(17 * i))
                          .remainder(251)
                          .to(at::kByte));
    on_device.push_back(on_host.back().to(world_.device()));
    gathered.push_back(
        {static_cast<const char*>(on_device.back().const_data_ptr()) + pieces[i].begin_bytes,
         pieces[i].size_bytes, i * kPitch + pieces[i].margin_bytes});
  }

  const c10::Storage block = GatherOnDevice(stream_, gathered, pieces.size() * kPitch);

  EXPECT_THAT(element_bytes(), ElementsAre(16, 16, 16, 16, 1, 1, 1, 1));
  const at::Tensor arrived =
      ViewOfStorage(block, at::kByte, 0, pieces.size() * kPitch).to(at::kCPU);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto* const place = static_cast<const char*>(arrived.const_data_ptr()) + i * kPitch;
    const auto* const given = static_cast<const char*>(on_host[i].const_data_ptr());
    EXPECT_EQ(std::memcmp(place + pieces[i].margin_bytes, given + pieces[i].begin_bytes,
                          pieces[i].size_bytes),
              0)
        << "piece " << i;
  }
}

}  // namespace
}  // namespace pinion
