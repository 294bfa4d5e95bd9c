#include "pinion/tests/hooks/emulated/parity_cases.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <sstream>
#include <utility>

namespace pinion {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Device;
using torch::ScalarType;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr uint64_t kModelSeed = 1234;
constexpr uint64_t kDataSeed = 5678;
constexpr uint64_t kStepSeed = 91011;

Tensor Normal(at::IntArrayRef sizes, Device device, ScalarType type) {
  return torch::randn(sizes).to(device, type);
}

Tensor Tokens(int64_t high, at::IntArrayRef sizes, Device device) {
  return torch::randint(high, sizes, torch::kLong).to(device);
}

// Builds the module on the CPU, so that all devices have the same weights.
template <typename Module, typename... Args>
Module Build(Device device, ScalarType type, Args&&... args) {
  torch::manual_seed(kModelSeed);
  Module module(std::forward<Args>(args)...);
  module->to(device, type);
  return module;
}

void AppendState(nn::Module& module, Tensors& results) {
  for (const Tensor& parameter : module.parameters()) {
    results.push_back(parameter.detach());
    if (parameter.grad().defined()) results.push_back(parameter.grad());
  }
  for (const Tensor& buffer : module.buffers()) results.push_back(buffer);
}

// Runs three steps of AdamW on `loss()`.
template <typename Loss>
Tensors Train(nn::Module& module, const Loss& loss) {
  torch::manual_seed(kStepSeed);
  torch::optim::AdamW optimizer(module.parameters(),
                                torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  Tensors results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const Tensor value = loss();
    value.backward();
    optimizer.step();
    results.push_back(value.detach());
  }
  AppendState(module, results);
  return results;
}

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width)
      : norm1(nn::LayerNormOptions({width})),
        norm2(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, 4 * width),
        down(nn::LinearOptions(4 * width, width).bias(false)),
        dropout(0.1) {
    register_module("norm1", norm1);
    register_module("norm2", norm2);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
    register_module("dropout", dropout);
  }
  Tensor forward(Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto heads = qkv(norm1(x)).view({batch, length, 3, 4, width / 4}).unbind(2);
    const Tensor attended = torch::scaled_dot_product_attention(
        heads[0].transpose(1, 2), heads[1].transpose(1, 2), heads[2].transpose(1, 2), {}, 0.0,
        /*is_causal=*/true);
    x = x + dropout(out(attended.transpose(1, 2).reshape({batch, length, width})));
    return x + dropout(down(F::gelu(up(norm2(x)))));
  }
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
  nn::Dropout dropout;
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl()
      : tokens(50, 32), positions(16, 32), block1(32), block2(32), norm(Norm()), head(32, 50) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    register_module("block1", block1);
    register_module("block2", block2);
    register_module("norm", norm);
    register_module("head", head);
  }
  static nn::LayerNormOptions Norm() { return nn::LayerNormOptions({32}); }
  Tensor forward(const Tensor& ids) {
    const Tensor places = torch::arange(ids.size(1), ids.options());
    return head(norm(block2(block1(tokens(ids) + positions(places)))));
  }
  nn::Embedding tokens, positions;
  Block block1, block2;
  nn::LayerNorm norm;
  nn::Linear head;
};
TORCH_MODULE(Gpt);

Tensors RunGpt(Device device, ScalarType type) {
  auto model = Build<Gpt>(device, type);
  torch::manual_seed(kDataSeed);
  const Tensor ids = Tokens(50, {4, 16}, device);
  const Tensor targets = Tokens(50, {4, 16}, device);
  return Train(*model,
               [&] { return F::cross_entropy(model(ids).flatten(0, 1), targets.flatten()); });
}

Tensors RunConvNet(Device device, ScalarType type) {
  torch::manual_seed(kModelSeed);
  nn::Sequential model(
      nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
      nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(8, 8, 3).groups(4).bias(false)),
      nn::GroupNorm(2, 8), nn::SiLU(),
      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 6, 3).stride(2)), nn::AvgPool2d(2),
      nn::AdaptiveAvgPool2d(2), nn::Flatten(), nn::Dropout(0.3), nn::Linear(24, 5));
  model->to(device, type);
  torch::manual_seed(kDataSeed);
  const Tensor images = Normal({4, 3, 12, 12}, device, type);
  const Tensor labels = Tokens(5, {4}, device);
  return Train(*model, [&] { return F::cross_entropy(model->forward(images), labels); });
}

Tensors RunAttentionModules(Device device, ScalarType type) {
  auto encoder = Build<nn::TransformerEncoderLayer>(
      device, type, nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.2));
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal({6, 3, 16}, device, type);
  Tensors results = Train(*encoder, [&] { return encoder(input).pow(2).mean(); });

  auto attention = Build<nn::MultiheadAttention>(device, type, 16, 4);
  torch::manual_seed(kDataSeed);
  const Tensor memory = Normal({5, 3, 16}, device, type);
  const Tensors more = Train(*attention, [&] {
    const auto [output, weights] = attention(input, memory, memory);
    return output.sum() + weights.pow(2).sum();
  });
  results.insert(results.end(), more.begin(), more.end());
  return results;
}

Tensors RunScaledDotProduct(Device device, ScalarType type) {
  Tensors results;
  for (const bool causal : {false, true}) {
    for (const double dropout : {0.0, 0.25}) {
      torch::manual_seed(kDataSeed);
      Tensors inputs;
      for (int i = 0; i < 3; ++i) {
        inputs.push_back(Normal({2, 4, 12, 8}, device, type).requires_grad_(true));
      }
      torch::manual_seed(kStepSeed);
      const Tensor output =
          torch::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], {}, dropout, causal);
      output.pow(2).sum().backward();
      results.push_back(output.detach());
      for (const Tensor& input : inputs) results.push_back(input.grad());
    }
  }
  return results;
}

Tensors RunDropout(Device device, ScalarType type) {
  Tensors results;
  for (const double p : {0.05, 0.1, 0.3, 0.37, 0.5, 0.9}) {
    torch::manual_seed(kDataSeed);
    const Tensor input = Normal({1000}, device, type).requires_grad_(true);
    torch::manual_seed(kStepSeed);
    const Tensor output = torch::dropout(input, p, /*train=*/true);
    (output * output).sum().backward();
    results.push_back(output.detach());
    results.push_back(input.grad());
  }
  return results;
}

template <typename Module, typename Options>
Tensors RunRecurrentModule(const Options& options, Device device, ScalarType type,
                           at::IntArrayRef input_sizes = {7, 3, 6}) {
  auto module = Build<Module>(device, type, options);
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal(input_sizes, device, type);
  return Train(*module, [&] { return std::get<0>(module(input)).pow(2).mean(); });
}

Tensors RunRecurrent(Device device, ScalarType type) {
  Tensors results;
  const auto append = [&](const Tensors& more) {
    results.insert(results.end(), more.begin(), more.end());
  };
  append(RunRecurrentModule<nn::LSTM>(
      nn::LSTMOptions(6, 5).num_layers(2).dropout(0.3).bidirectional(true), device, type));
  append(
      RunRecurrentModule<nn::GRU>(nn::GRUOptions(6, 5).num_layers(2).dropout(0.3), device, type));
  append(RunRecurrentModule<nn::RNN>(nn::RNNOptions(6, 5), device, type));
  append(RunRecurrentModule<nn::LSTM>(nn::LSTMOptions(12, 10), device, type, {15, 4, 12}));
  append(RunRecurrentModule<nn::LSTM>(nn::LSTMOptions(33, 64), device, type, {20, 5, 33}));
  append(RunRecurrentModule<nn::LSTM>(nn::LSTMOptions(16, 16).batch_first(true), device, type,
                                      {1, 31, 16}));
  append(RunRecurrentModule<nn::LSTM>(nn::LSTMOptions(6, 8).proj_size(3), device, type));
  append(RunRecurrentModule<nn::GRU>(nn::GRUOptions(12, 10).bidirectional(true), device, type,
                                     {15, 4, 12}));
  auto cell = Build<nn::LSTMCell>(device, type, 6, 5);
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal({3, 6}, device, type);
  append(Train(*cell, [&] { return std::get<0>(cell(input)).sum(); }));
  return results;
}

// oneDNN has other kernels for inference than for training.
Tensors RunRecurrentInference(Device device, ScalarType type) {
  auto module = Build<nn::LSTM>(device, type, nn::LSTMOptions(12, 10));
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal({15, 4, 12}, device, type);
  const torch::NoGradGuard inference;
  return {std::get<0>(module(input))};
}

Tensors RunPackedSequence(Device device, ScalarType type) {
  auto module = Build<nn::LSTM>(device, type, nn::LSTMOptions(6, 5));
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal({7, 3, 6}, device, type);
  const Tensor lengths = torch::tensor({7, 4, 2}, torch::kLong);
  return Train(*module, [&] {
    const auto packed = nn::utils::rnn::pack_padded_sequence(input, lengths);
    const auto output = std::get<0>(module->forward_with_packed_input(packed));
    return std::get<0>(nn::utils::rnn::pad_packed_sequence(output)).pow(2).sum();
  });
}

Tensors RunRandomNumbers(Device device, ScalarType type) {
  torch::manual_seed(kDataSeed);
  const auto options = torch::TensorOptions().device(device);
  Tensors results = {torch::randn({5, 7}, options.dtype(type)),
                     torch::rand({33}, options),
                     torch::randint(100, {20}, options.dtype(torch::kLong)),
                     torch::randperm(50, options.dtype(torch::kLong)),
                     torch::empty({40}, options).bernoulli_(0.3),
                     torch::empty({40}, options).exponential_(),
                     torch::ones({10}, options).multinomial(4)};
  auto generator = device.is_cpu() ? at::detail::createCPUGenerator(7)
                                   : at::globalContext()
                                         .getAcceleratorHooksInterface(device.type())
                                         .getNewGenerator(device.index());
  generator.set_current_seed(7);
  results.push_back(torch::randn({8}, generator, options));
  const Tensor state = generator.get_state();
  results.push_back(torch::randn({8}, generator, options));
  generator.set_state(state);
  results.push_back(torch::randn({8}, generator, options));
  return results;
}

Tensors RunOperators(Device device, ScalarType type) {
  torch::manual_seed(kDataSeed);
  const Tensor a = Normal({6, 8}, device, type), b = Normal({6, 8}, device, type);
  const Tensor square = Normal({8, 8}, device, torch::kFloat);
  const Tensor index = Tokens(6, {4}, device);
  Tensors results = {a + b * 2,
                     a.t().contiguous(),
                     a.softmax(-1),
                     a.masked_select(a > 0),
                     a.nonzero(),
                     a.index({index}),
                     a.index({a > 0.5}),
                     a.index_select(0, index),
                     a.gather(1, Tokens(8, {6, 2}, device)),
                     torch::where(a > 0, a, b),
                     torch::cat({a, b}, 1),
                     torch::stack({a, b}),
                     std::get<0>(a.sort(1)),
                     std::get<1>(a.topk(3)),
                     a.cumsum(0),
                     a.unfold(1, 3, 2),
                     a.repeat({2, 1}),
                     torch::einsum("ij,kj->ik", {a, b}),
                     torch::addr(a.select(1, 0), a.select(1, 1), a.select(1, 2).narrow(0, 0, 6)),
                     torch::linalg_inv(square),
                     std::get<0>(torch::linalg_qr(square)),
                     torch::view_as_real(torch::fft_fft(square)),
                     a.mean(0, true),
                     a.std(),
                     a.clone().index_put_({index}, 3.0),
                     torch::zeros_like(a).scatter_add_(0, Tokens(6, {6, 8}, device), b),
                     a.flip({1}).roll(1, 0),
                     torch::arange(10, torch::TensorOptions().device(device)),
                     torch::full({3}, 2.5, torch::TensorOptions().device(device)),
                     torch::tril_indices(4, 4, 0, torch::TensorOptions().device(device)),
                     a.to(torch::kDouble).to(torch::kHalf),
                     std::get<0>(a.max(1)),
                     a.argmax()};
  for (const Tensor& part : a.chunk(3, 1)) results.push_back(part);
  Tensor written = a.clone();
  written.select(0, 2).add_(1);
  written.slice(1, 1, 5).mul_(b.slice(1, 1, 5));
  results.push_back(written);
  Tensor grown = torch::empty({0}, a.options());
  torch::add_out(grown, a, b);
  results.push_back(grown);
  return results;
}

Tensors RunOptimizerKernels(Device device, ScalarType type) {
  torch::manual_seed(kDataSeed);
  Tensors values, grads, averages, squares, steps;
  for (const int64_t size : {3, 100, 1000}) {
    values.push_back(Normal({size}, device, type));
    grads.push_back(Normal({size}, device, type));
    averages.push_back(torch::zeros_like(values.back()));
    squares.push_back(torch::zeros_like(values.back()));
    steps.push_back(torch::ones({}, torch::TensorOptions().device(device)));
  }
  at::_fused_adamw_(values, grads, averages, squares, {}, steps, 1e-2, 0.9, 0.99, 0.1, 1e-8,
                    /*amsgrad=*/false, /*maximize=*/false);
  at::_foreach_mul_(grads, 0.5);
  at::_foreach_addcmul_(values, grads, averages, 0.1);
  const Tensors norms = at::_foreach_norm(grads);
  for (const Tensors& list : {grads, averages, squares, norms}) {
    values.insert(values.end(), list.begin(), list.end());
  }
  return values;
}

Tensors RunSaveAndLoad(Device device, ScalarType type) {
  auto model = Build<Gpt>(device, type);
  std::stringstream stream;
  torch::save(model, stream);
  Gpt loaded;
  loaded->to(type);
  torch::load(loaded, stream, device);
  Tensors results;
  AppendState(*loaded, results);
  std::stringstream tensors;
  torch::save(Tensors{results[0], results[1].t()}, tensors);
  Tensors read;
  torch::load(read, tensors);
  for (const Tensor& tensor : read) {
    TORCH_CHECK(tensor.device() == device, "loaded to ", tensor.device());
    results.push_back(tensor);
  }
  return results;
}

Tensors RunAutocast(Device device, ScalarType /*type*/) {
  // The CPU's autocast has other lists, so the policies that matter are written out for it.
  auto linear = Build<nn::Linear>(device, torch::kFloat, 16, 8);
  torch::manual_seed(kDataSeed);
  const Tensor input = Normal({4, 16}, device, torch::kFloat);
  Tensor product, probabilities;
  if (device.is_cpu()) {
    product = torch::linear(input.to(torch::kBFloat16), linear->weight.to(torch::kBFloat16),
                            linear->bias.to(torch::kBFloat16));
    probabilities = torch::softmax(product.to(torch::kFloat), -1);
  } else {
    at::autocast::set_autocast_enabled(device.type(), true);
    at::autocast::set_autocast_dtype(device.type(), torch::kBFloat16);
    product = linear(input);
    probabilities = torch::softmax(product, -1);
    at::autocast::set_autocast_enabled(device.type(), false);
    at::autocast::clear_cache();
  }
  probabilities.pow(2).sum().backward();
  return {product.detach(), probabilities.detach(), linear->weight.grad()};
}

}  // namespace

std::vector<ParityCase> ParityCases() {
  return {{"Gpt", RunGpt},
          {"ConvNet", RunConvNet},
          {"AttentionModules", RunAttentionModules},
          {"ScaledDotProduct", RunScaledDotProduct},
          {"Dropout", RunDropout},
          {"Recurrent", RunRecurrent},
          {"RecurrentInference", RunRecurrentInference},
          {"PackedSequence", RunPackedSequence},
          {"RandomNumbers", RunRandomNumbers},
          {"Operators", RunOperators},
          {"OptimizerKernels", RunOptimizerKernels},
          {"SaveAndLoad", RunSaveAndLoad},
          {"Autocast", RunAutocast}};
}

}  // namespace pinion
