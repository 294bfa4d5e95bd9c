#include "pinion/bench/null_torch_device.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;

class NullTorchDeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { RegisterNullTorchDevice(); }
};

struct Seen {
  std::vector<const void*> packed;
  std::vector<const void*> unpacked;
  int released = 0;
};

// Records the packing, unpacking and release of each saved tensor.
class Watcher : public SavedTensorPacker {
 public:
  explicit Watcher(Seen& seen) : seen_(seen) {}
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    seen_.packed.push_back(tensor.storage().data());
    return std::make_unique<Saved>(seen_, DetachedAlias(tensor));
  }

 private:
  class Saved : public SavedTensor {
   public:
    Saved(Seen& seen, at::Tensor tensor) : seen_(seen), tensor_(std::move(tensor)) {}
    ~Saved() override { ++seen_.released; }
    at::Tensor Unpack() override {
      seen_.unpacked.push_back(tensor_.storage().data());
      return tensor_;
    }

   private:
    Seen& seen_;
    const at::Tensor tensor_;
  };
  Seen& seen_;
};

TEST_F(NullTorchDeviceTest, EveryTensorIsSavedReadInReverseOrderAndLetGoOf) {
  Seen seen;
  const double step_us = SavingStep{.tensors = 3, .tensor_bytes = 4096}.RunUs(
      [&seen] { return std::make_shared<SavedTensorScope>(std::make_shared<Watcher>(seen)); });
  EXPECT_GT(step_us, 0);
  ASSERT_EQ(seen.packed.size(), 3);
  EXPECT_THAT(seen.unpacked, ElementsAre(seen.packed[2], seen.packed[1], seen.packed[0]));
  EXPECT_NE(seen.packed[0], seen.packed[1]);
  EXPECT_EQ(seen.released, 3);
}

TEST_F(NullTorchDeviceTest, WithoutAScopeNothingIsHooked) {
  Seen seen;
  SavingStep{.tensors = 3, .tensor_bytes = 4096}.RunUs([] { return nullptr; });
  EXPECT_TRUE(seen.packed.empty());
}

TEST_F(NullTorchDeviceTest, TheScopeEndsBeforeBackwardBegins) {
  bool ended = false;
  Seen seen;
  SavingStep{.tensors = 1, .tensor_bytes = 4096}.RunUs([&] {
    const auto scope = std::make_shared<SavedTensorScope>(std::make_shared<Watcher>(seen));
    return std::shared_ptr<void>(scope.get(), [scope, &seen, &ended](void*) {
      ended = seen.packed.size() == 1 && seen.unpacked.empty();
    });
  });
  EXPECT_TRUE(ended);
}

TEST_F(NullTorchDeviceTest, ATensorOfTheNullDeviceHasItsSizeAndAPlaceOfItsOwn) {
  const at::Tensor one = NewNullTensor(4096);
  const at::Tensor other = NewNullTensor(4096);
  EXPECT_EQ(one.nbytes(), 4096);
  EXPECT_EQ(one.device().str(), "null:0");
  EXPECT_GE(static_cast<const char*>(other.storage().data()) -
                static_cast<const char*>(one.storage().data()),
            4096);
}

TEST_F(NullTorchDeviceTest, AfterTheLastAddressesComeTheFirst) {
  constexpr uint64_t kBytes = uint64_t{3} << 40;  // two fit
  const void* const first = NewNullTensor(kBytes).storage().data();
  const void* const second = NewNullTensor(kBytes).storage().data();
  EXPECT_NE(second, first);
  const void* const third = NewNullTensor(kBytes).storage().data();
  EXPECT_LT(third, second);
  EXPECT_NE(NewNullTensor(kBytes).storage().data(), third);
}

}  // namespace
}  // namespace pinion
