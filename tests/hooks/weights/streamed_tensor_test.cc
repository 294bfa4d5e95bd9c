// Which keeper a streamed tensor has.

#include "pinion/hooks/weights/streamed_tensor.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/hooks/support/error_of.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

struct NoKeeper : ResidencyKeeper {
  void Enter(uint32_t, uint64_t) override {}
  void Leave(uint32_t) override {}
  bool Write(uint32_t, const WritingOperator&) override { return false; }
};

TEST(StreamedTensor, WhoseStorageHasOtherMemoryOutlivesItsKeeperAndIsNamed) {
  const c10::Device cpu(c10::DeviceType::CPU);
  auto keeper = std::make_shared<NoKeeper>();
  const at::Tensor like = at::ones({4});
  c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), c10::DataPtr(nullptr, cpu),
                       c10::GetAllocator(cpu.type()), /*resizable=*/false);
  MakeStreamed(storage, keeper, 0);
  const at::Tensor tensor = MakeStreamedTensor(like, 0, storage);
  EXPECT_EQ(KeeperOf(tensor), keeper.get());
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, cpu));  // was the last but one owner
  keeper.reset();
  EXPECT_THAT(ErrorOf([&] { KeeperOf(tensor); }), HasSubstr("given other memory"));
}

}  // namespace
}  // namespace pinion::testing
