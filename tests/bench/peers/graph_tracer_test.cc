#include "pinion/bench/peers/graph_tracer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/bench/peers/graph_plan.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;

class Tracing : public SavedTensorPacker {
 public:
  explicit Tracing(GraphTracer& tracer) : tracer_(tracer) {}
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override {
    tracer_.Save(tensor, place);
    return std::make_unique<Saved>(tracer_, tensor, saves_++);
  }

 private:
  class Saved : public SavedTensor {
   public:
    Saved(GraphTracer& tracer, const at::Tensor& tensor, int save)
        : tracer_(tracer), tensor_(DetachedAlias(tensor)), save_(save) {}
    at::Tensor Unpack() override {
      tracer_.Read(save_);
      return tensor_;
    }

   private:
    GraphTracer& tracer_;
    const at::Tensor tensor_;
    const int save_;
  };
  GraphTracer& tracer_;
  int saves_ = 0;
};

class GraphTracerTest : public ::testing::Test {
 protected:
  // Saves its input, output and parameter if its input requires a gradient.
  at::Tensor Layer(const at::Tensor& x, int layer) const {
    return at::tanh(at::mm(x, parameters_[layer]));
  }
  GraphTrace Trace(const std::function<at::Tensor(const at::Tensor&)>& forward) const {
    GraphTracer tracer({{parameters_[0]}, {parameters_[1]}, {parameters_[2]}}, {input_, head_},
                       at::kCPU);
    at::Tensor output;
    {
      const SavedTensorScope scope(std::make_shared<Tracing>(tracer));
      output = forward(input_);
    }
    output.sum().backward();
    return tracer.trace();
  }
  static at::Tensor Parameter() { return at::ones({8, 8}).requires_grad_(true); }

  const std::vector<at::Tensor> parameters_ = {Parameter(), Parameter(), Parameter()};
  const at::Tensor head_ = Parameter();
  const at::Tensor input_ = at::ones({8, 8});
};

std::vector<int> LayersOfObjects(const GraphTrace& trace) {
  std::vector<int> layers;
  for (const GraphTrace::Object& object : trace.objects) layers.push_back(object.layer);
  return layers;
}

// The next layer saves the object.
TEST_F(GraphTracerTest, AnObjectBelongsToTheLayerThatHasMadeIt) {
  const GraphTrace trace = Trace([this](const at::Tensor& x) {
    return at::mm(at::mm(at::mm(x, parameters_[0]), parameters_[1]), head_);
  });
  EXPECT_THAT(LayersOfObjects(trace), ElementsAre(0, 1));
  EXPECT_THAT(trace.objects[0].size_bytes, 8 * 8 * sizeof(float));
  EXPECT_THAT(trace.objects[1].region, 2);
}

TEST_F(GraphTracerTest, ASaveBelongsToTheLayerWhoseParameterItsNodeUses) {
  const GraphTrace trace =
      Trace([this](const at::Tensor& x) { return at::mm(Layer(Layer(x, 0), 1), head_); });
  std::vector<int> savers;
  for (const GraphTrace::Save& save : trace.saves) {
    if (save.object == 0) savers.push_back(save.layer);
  }
  EXPECT_THAT(savers, ElementsAre(0, 1));
  EXPECT_EQ(trace.saves.back().layer, kNotInLayers);
  EXPECT_EQ(trace.saves.back().region, 3);
}

TEST_F(GraphTracerTest, ParametersAndInputsAreNoObjects) {
  const GraphTrace trace = Trace([this](const at::Tensor& x) { return at::mm(x, head_); });
  ASSERT_FALSE(trace.saves.empty());
  EXPECT_TRUE(trace.objects.empty());
}

TEST_F(GraphTracerTest, AViewIsSavedAsTheTensorThatItIsAViewOf) {
  const GraphTrace trace =
      Trace([this](const at::Tensor& x) { return at::mm(at::mm(x, parameters_[0]).t(), head_); });
  ASSERT_EQ(trace.objects.size(), 1u);
  EXPECT_TRUE(trace.objects[0].is_contiguous);
  EXPECT_EQ(trace.objects[0].layer, 0);
}

TEST_F(GraphTracerTest, WhatIsNotContiguousItselfIsToldFromAView) {
  const GraphTrace trace = Trace([this](const at::Tensor& x) {
    return at::tanh(at::mm(x, parameters_[0]).t()) + 1;  // tanh keeps its input's strides
  });
  ASSERT_EQ(trace.objects.size(), 1u);
  EXPECT_FALSE(trace.objects[0].is_contiguous);
}

TEST_F(GraphTracerTest, TheFirstBatchIsLetGoOfWhenBackwardBegins) {
  const at::Tensor batch = at::ones({8, 8});
  GraphTracer tracer({{parameters_[0]}}, {batch}, at::kCPU);
  const size_t uses = batch.storage().use_count();
  at::Tensor output;
  {
    const SavedTensorScope scope(std::make_shared<Tracing>(tracer));
    output = at::tanh(at::mm(input_, parameters_[0]));
  }
  EXPECT_EQ(batch.storage().use_count(), uses);
  output.sum().backward();
  EXPECT_EQ(batch.storage().use_count(), uses - 1);
}

TEST_F(GraphTracerTest, TensorsOfOtherDevicesAreNoObjects) {
  GraphTracer tracer({}, {}, at::kMeta);
  tracer.Save(at::ones({8, 8}), {});
  EXPECT_EQ(tracer.trace().saves[0].object, kNoObject);
}

// No single tensor has them all as views, so their storage cannot be copied as one tensor.
TEST_F(GraphTracerTest, TensorsOverOneStorageThatAreNotViewsOfOneTensorAreToldApart) {
  const at::Tensor whole = at::ones({8, 8});
  const at::Tensor first_half = at::empty({0}).set_(whole.storage(), 0, {4, 8}, {8, 1});
  const at::Tensor second_half = at::empty({0}).set_(whole.storage(), 32, {4, 8}, {8, 1});
  for (const std::vector<at::Tensor>& saved :
       {std::vector<at::Tensor>{whole, first_half}, {second_half}, {whole, whole.view(at::kInt)}}) {
    GraphTracer tracer({}, {}, at::kCPU);
    for (const at::Tensor& tensor : saved) tracer.Save(tensor, {});
    ASSERT_EQ(tracer.trace().objects.size(), 1u);
    EXPECT_FALSE(tracer.trace().objects[0].is_contiguous);
  }
}

TEST_F(GraphTracerTest, WhatHasNoHistoryBelongsToTheLayerThatSavesIt) {
  const at::Tensor mask = at::ones({8, 8});
  const GraphTrace trace =
      Trace([&](const at::Tensor& x) { return at::mm(x, parameters_[0]) * mask; });
  EXPECT_THAT(LayersOfObjects(trace), ElementsAre(0));
}

TEST_F(GraphTracerTest, ALayerThatRunsTwiceHasTwoRegions) {
  const GraphTrace trace =
      Trace([this](const at::Tensor& x) { return Layer(Layer(Layer(x, 0), 1), 0); });
  EXPECT_THAT(LayersOfObjects(trace), ElementsAre(0, 1, 0));
  EXPECT_EQ(trace.objects[2].region, 3);
}

}  // namespace
}  // namespace pinion
