// Checks the cost of operators on the emulated device: FLOPs, bytes of memory and kernels.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"

namespace pinion {
namespace {

struct Case {
  const char* name;
  double expected;
  std::function<void()> run;
};

class CostsTest : public ::testing::Test {
 protected:
  // A kernel takes a microsecond per FLOP, or per byte; the other costs nothing.
  static constexpr double kEndless = 1e9;
  static constexpr double kOnePerUs = 1e-6;      // TFLOP/s
  static constexpr double kOneBytePerUs = 1e-3;  // GB/s

  explicit CostsTest(const DevicePreset& preset) {
    EmulatedOptions options;
    options.memory_bytes = uint64_t{64} << 20;
    options.preset = preset;
    options.preset.launch_us = 0;
    machine_ = EmulatedMachine::Create(options).value();
    EXPECT_TRUE(RegisterEmuDevice(machine_).ok());
  }

  double CostOf(const std::function<void()>& run) {
    EXPECT_TRUE(machine_->SynchronizeDevice(0).ok());
    machine_->ResetTimeStats(0);
    run();
    EXPECT_TRUE(machine_->SynchronizeDevice(0).ok());
    return machine_->time_stats(0).compute_busy_ms * 1e3;
  }

  void Expect(const std::vector<Case>& cases) {
    for (const Case& item : cases) EXPECT_NEAR(CostOf(item.run), item.expected, 0.01) << item.name;
  }

  static at::TensorOptions OnEmu(at::ScalarType type = at::kFloat) {
    return at::TensorOptions().device(c10::Device("emu:0")).dtype(type);
  }
  static at::Tensor Zeros(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
    return at::zeros(sizes, OnEmu(type));
  }

  std::shared_ptr<EmulatedMachine> machine_;
};

class FlopsTest : public CostsTest {
 protected:
  // A FLOP takes 1 us in float, 2 us in bfloat16 and 4 us in double.
  FlopsTest() : CostsTest(Preset()) {}

  static DevicePreset Preset() {
    DevicePreset preset;
    preset.float32_tflop_per_s = kOnePerUs;
    preset.bfloat16_tflop_per_s = kOnePerUs / 2;
    preset.float64_tflop_per_s = kOnePerUs / 4;
    preset.memory_gb_per_s = kEndless;
    return preset;
  }
};

TEST_F(FlopsTest, OfAProductAreTwoForEachPairThatMeets) {
  const at::Tensor a = Zeros({3, 4}), b = Zeros({4, 5}), c = Zeros({3, 5});
  const at::Tensor as = Zeros({2, 3, 4}), bs = Zeros({2, 4, 5}), cs = Zeros({2, 3, 5});
  const at::Tensor three = Zeros({3}), four = Zeros({4}), five = Zeros({5});
  const double product = 2 * 3 * 4 * 5;
  Expect({{"mm", product, [&] { at::mm(a, b); }},
          {"bmm", 2 * product, [&] { at::bmm(as, bs); }},
          {"mv", 2 * 3 * 4, [&] { at::mv(a, four); }},
          {"dot", 2 * 4, [&] { at::dot(four, four); }},
          {"addmm", product, [&] { at::addmm(five, a, b); }},
          {"addmm_", product, [&] { c.addmm_(a, b); }},
          {"_addmm_activation", product, [&] { at::_addmm_activation(five, a, b); }},
          {"addmv", 2 * 3 * 4, [&] { at::addmv(three, a, four); }},
          {"addmv_", 2 * 3 * 4, [&] { three.addmv_(a, four); }},
          {"addbmm", 2 * product, [&] { at::addbmm(c, as, bs); }},
          {"addbmm_", 2 * product, [&] { c.addbmm_(as, bs); }},
          {"baddbmm", 2 * product, [&] { at::baddbmm(cs, as, bs); }},
          {"baddbmm_", 2 * product, [&] { cs.baddbmm_(as, bs); }},
          {"add", 0, [&] { a + a; }}});
}

TEST_F(FlopsTest, TakeTheTimeOfTheirType) {
  const auto product = [&](at::ScalarType type) {
    const at::Tensor a = Zeros({4, 4}, type);
    return CostOf([&] { at::mm(a, a); });
  };
  const double flops = 2 * 4 * 4 * 4;
  EXPECT_NEAR(product(at::kFloat), flops, 0.01);
  EXPECT_NEAR(product(at::kBFloat16), 2 * flops, 0.01);
  EXPECT_NEAR(product(at::kHalf), 2 * flops, 0.01);
  EXPECT_NEAR(product(at::kDouble), 4 * flops, 0.01);
}

TEST_F(FlopsTest, OfAConvolutionAreTwiceTheWeightsOfAChannelForEachOutput) {
  const at::Tensor input = Zeros({2, 3, 7, 8}), weight = Zeros({4, 3, 3, 2});
  // 4 x 6 outputs: (7 + 2 x 1 - 3) / 2 + 1 and (8 - 3) / 1 + 1.
  const std::vector<int64_t> stride = {2, 1}, padding = {1, 0}, dilation = {1, 2};
  const double forward = 2.0 * (3 * 3 * 2) * (2 * 4) * (4 * 6);
  const at::Tensor grad = Zeros({2, 4, 4, 6});
  const auto backward = [&](bool of_input, bool of_weight, bool of_bias) {
    at::convolution_backward(grad, input, weight, at::IntArrayRef({4}), stride, padding, dilation,
                             /*transposed=*/false, {0, 0}, 1, {of_input, of_weight, of_bias});
  };
  // Each input element is multiplied with its channel's weights.
  const at::Tensor small = Zeros({2, 4, 5, 5}), transposed = Zeros({4, 3, 3, 3});
  const double up = 2.0 * (3 * 3 * 3) * (2 * 4 * 5 * 5);
  const at::Tensor large_grad = Zeros({2, 3, 7, 7});
  Expect({{"two dimensions", forward,
           [&] {
             at::convolution(input, weight, {}, stride, padding, dilation, false, {0, 0}, 1);
           }},
          {"_convolution", forward,
           [&] {
             at::_convolution(input, weight, {}, stride, padding, dilation, false, {0, 0}, 1, false,
                              false, false, false);
           }},
          // (7 - 3) / 2 + 1 by (8 - 2) / 2 + 1.
          {"one number for all dimensions", 2.0 * (3 * 3 * 2) * (2 * 4) * (3 * 4),
           [&] { at::convolution(input, weight, {}, {2}, {0}, {1}, false, {0}, 1); }},
          // 7 + 2 - 3 + 1 by 8 + 2 - 2 + 1.
          {"padded", 2.0 * (3 * 3 * 2) * (2 * 4) * (7 * 9),
           [&] { at::convolution(input, weight, {}, {1}, {1}, {1}, false, {0}, 1); }},
          {"transposed", up,
           [&] {
             at::conv_transpose2d(small, transposed, {}, {1, 1}, {0, 0});
           }},
          {"all gradients", 2 * forward, [&] { backward(true, true, true); }},
          {"the input's", forward, [&] { backward(true, false, false); }},
          {"the weight's", forward, [&] { backward(false, true, false); }},
          {"the bias's", 0, [&] { backward(false, false, true); }},
          {"backward, transposed", 2 * up, [&] {
             at::convolution_backward(large_grad, small, transposed, at::IntArrayRef({3}), {1, 1},
                                      {0, 0}, {1, 1}, /*transposed=*/true, {0, 0}, 1,
                                      {true, true, false});
           }}});
}

// Forward computes two products of queries and keys, backward five; a causal mask halves them.
TEST_F(FlopsTest, OfAttentionAreThoseOfItsProducts) {
  const double product = 2.0 * (1 * 2 * 6) * 10 * 8;
  for (const auto& [type, us] : {std::pair(at::kFloat, 1), std::pair(at::kBFloat16, 2)}) {
    for (const bool causal : {false, true}) {
      const at::Tensor query = Zeros({1, 2, 6, 8}, type).requires_grad_(true);
      const at::Tensor key = Zeros({1, 2, 10, 8}, type), value = Zeros({1, 2, 10, 8}, type);
      at::Tensor out;
      const double times = us * (causal ? 0.5 : 1);
      Expect({{"forward", 2 * product * times,
               [&] { out = at::scaled_dot_product_attention(query, key, value, {}, 0.0, causal); }},
              {"backward", 5 * product * times, [&] { out.sum().backward(); }}});
    }
  }
}

// Two FLOPs per weight and row of the input; backward also recomputes forward.
TEST_F(FlopsTest, OfARecurrentLayerAreThoseOfItsWeights) {
  constexpr int64_t kLength = 5, kBatch = 2, kIn = 3, kHidden = 4;
  const auto weights = [](int64_t gates) {
    return std::vector<at::Tensor>{Zeros({gates * kHidden, kIn}), Zeros({gates * kHidden, kHidden}),
                                   Zeros({gates * kHidden}), Zeros({gates * kHidden})};
  };
  const double of_a_row = 2 * kHidden * (kIn + kHidden);  // and per gate
  const double rows = kLength * kBatch;
  const at::Tensor input = Zeros({kLength, kBatch, kIn}).requires_grad_(true);
  const at::Tensor one = Zeros({kBatch, kIn}), packed = Zeros({7, kIn});
  const at::Tensor sizes = at::tensor({2, 2, 1, 1, 1}, at::kLong);
  const at::Tensor hidden = Zeros({1, kBatch, kHidden}), of_cell = Zeros({kBatch, kHidden});
  const auto w1 = weights(1), w3 = weights(3), w4 = weights(4);
  at::Tensor out;
  Expect({{"lstm", 4 * of_a_row * rows,
           [&] {
             out = std::get<0>(
                 at::lstm(input, {hidden, hidden}, w4, true, 1, 0.0, false, false, false));
           }},
          {"lstm, backward", 3 * 4 * of_a_row * rows, [&] { out.sum().backward(); }},
          {"lstm, packed", 4 * of_a_row * 7,
           [&] {
             at::lstm(packed, sizes, {hidden, hidden}, w4, true, 1, 0.0, false, false);
           }},
          {"gru", 3 * of_a_row * rows,
           [&] { at::gru(input, hidden, w3, true, 1, 0.0, false, false, false); }},
          {"rnn_tanh", of_a_row * rows,
           [&] { at::rnn_tanh(input, hidden, w1, true, 1, 0.0, false, false, false); }},
          {"rnn_relu", of_a_row * rows,
           [&] { at::rnn_relu(input, hidden, w1, true, 1, 0.0, false, false, false); }},
          {"lstm_cell", 4 * of_a_row * kBatch,
           [&] {
             at::lstm_cell(one, {of_cell, of_cell}, w4[0], w4[1], w4[2], w4[3]);
           }},
          {"gru_cell", 3 * of_a_row * kBatch,
           [&] { at::gru_cell(one, of_cell, w3[0], w3[1], w3[2], w3[3]); }}});
}

class BytesTest : public CostsTest {
 protected:
  BytesTest() : CostsTest(Preset()) {}

  static DevicePreset Preset() {
    DevicePreset preset;
    preset.float32_tflop_per_s = kEndless;
    preset.bfloat16_tflop_per_s = kEndless;
    preset.float64_tflop_per_s = kEndless;
    preset.memory_gb_per_s = kOneBytePerUs;
    return preset;
  }
};

TEST_F(BytesTest, AreThoseOfArgumentsAndResults) {
  const at::Tensor a = Zeros({10}), b = Zeros({10}), mask = Zeros({10}, at::kBool);
  const at::Tensor ones = at::ones({10}, OnEmu());
  at::Tensor out = Zeros({10});
  Expect({{"two arguments", 3 * 40, [&] { a + b; }},
          {"one, twice", 2 * 40, [&] { a + a; }},
          {"in place", 3 * 40, [&] { a.add_(b); }},
          {"in place, with itself", 2 * 40, [&] { a.mul_(a); }},
          {"out", 3 * 40, [&] { at::add_out(out, a, b); }},
          {"out, an argument", 3 * 40, [&] { at::add_out(out, out, b); }},
          {"no arguments", 80, [&] { at::arange(10, OnEmu(at::kLong)); }},
          {"fresh results", 40 + 80, [&] { at::nonzero(ones); }},
          {"an item", 4, [&] { a.select(0, 1).item(); }},
          {"every second element", 20 + 4, [&] { a.as_strided({5}, {2}).sum(); }},
          {"one element, a hundred times", 4 + 4, [&] { a.select(0, 1).expand({100}).sum(); }},
          {"a copy", 2 * 40, [&] { a.copy_(b); }},
          {"a copy to another type", 40 + 80, [&] { a.to(at::kDouble); }},
          {"dropout", 2 * 40 + 10, [&] { at::native_dropout(a, 0.5, true); }},
          {"dropout, backward", 2 * 40 + 10, [&] { at::native_dropout_backward(a, mask, 2); }}});
}

TEST_F(BytesTest, OfWhatIsOverwrittenAreCountedOnce) {
  const at::Tensor a = Zeros({10}), b = Zeros({10});
  const std::vector<at::Tensor> first = {a}, second = {b}, both = {a, b};
  Expect({{"zero_", 40, [&] { a.zero_(); }},
          {"fill_", 40, [&] { a.fill_(1); }},
          {"normal_", 40, [&] { a.normal_(); }},
          {"uniform_", 40, [&] { a.uniform_(); }},
          {"bernoulli_", 40, [&] { a.bernoulli_(0.5); }},
          {"random_", 40, [&] { a.random_(); }},
          {"exponential_", 40, [&] { a.exponential_(); }},
          {"_foreach_zero_", 80, [&] { at::_foreach_zero_(both); }},
          {"_foreach_copy_", 80, [&] { at::_foreach_copy_(first, second); }}});
}

// The touched elements, read and written, and their indices; or the whole table if that is less.
TEST_F(BytesTest, OfATableAreThoseThatItsIndicesTouch) {
  const at::Tensor table = Zeros({100, 8}), few = Zeros({1, 8}), elements = Zeros({5, 8});
  const at::Tensor rows = Zeros({5}, at::kLong), all = Zeros({5, 8}, at::kLong);
  const double by_row = 2 * (5 * 8 + 5 * 8 * 4), by_element = 2 * (5 * 8 * 8 + 5 * 8 * 4);
  Expect({{"index_select", by_row, [&] { at::index_select(table, 0, rows); }},
          {"a small table", by_row / 2 + 8 * 4, [&] { at::index_select(few, 0, rows); }},
          {"index", by_row, [&] { table.index({rows}); }},
          {"gather", by_element, [&] { at::gather(table, 0, all); }},
          {"take", 2 * (5 * 8 + 5 * 4), [&] { at::take(table, rows); }},
          {"index_put_", by_row, [&] { table.index_put_({rows}, elements); }},
          {"a small table, in place", by_row / 2 + 2 * 8 * 4,
           [&] { few.index_put_({rows}, elements); }},
          {"index_add_", by_row, [&] { table.index_add_(0, rows, elements); }},
          {"index_copy_", by_row, [&] { table.index_copy_(0, rows, elements); }},
          {"scatter_", by_element, [&] { table.scatter_(0, all, elements); }},
          {"scatter_add_", by_element, [&] { table.scatter_add_(0, all, elements); }}});
}

TEST_F(BytesTest, AnOperatorIsOneKernel) {
  const at::Tensor a = Zeros({10}), b = Zeros({10});
  const std::vector<at::Tensor> both = {a, b};
  const Case cases[] = {
      {"add", 1, [&] { a + b; }},
      {"_foreach_copy_", 1, [&] { at::_foreach_copy_(both, both); }},
      {"native_dropout", 1, [&] { at::native_dropout(a, 0.5, true); }},
      {"a view", 0,
       [&] {
         a.view({2, 5});
       }},
      {"a copy of nothing", 0, [&] { a.narrow(0, 0, 0).copy_(b.narrow(0, 0, 0)); }}};
  for (const Case& item : cases) {
    CostOf(item.run);
    EXPECT_EQ(machine_->time_stats(0).kernels, item.expected) << item.name;
  }
}

}  // namespace
}  // namespace pinion
