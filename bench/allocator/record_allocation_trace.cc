// Records the host allocations of activation offload in a few steps of a training program.
//
//   record_allocation_trace --model=gpt --steps=6 > bench/allocator/traces/gpt2_small.txt
//
// Runs on the CPU: sizes do not depend on the device. A saved storage of at least 1 KiB that is not
// a parameter's is one block, live from its first save to the end of its last handle.

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/bench/allocator/allocation_trace.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/gpt.h"

ABSL_FLAG(std::string, model, "gpt", "gpt, convnet or lstm");
ABSL_FLAG(int, steps, 6, "training steps, each of another batch and sequence");
ABSL_FLAG(uint32_t, seed, 1, "of the shapes");

namespace pinion {
namespace {

constexpr uint64_t kMinSavedBytes = 1024;  // OffloadOptions::min_offload_bytes

// Numbers live storages and writes their allocations and frees.
class Recorder : public SavedTensorPacker, public std::enable_shared_from_this<Recorder> {
 public:
  explicit Recorder(ParameterStorages parameters) : parameters_(std::move(parameters)) {}

  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    const TensorKind kind =
        ClassifyTensor(tensor, c10::DeviceType::CPU, kMinSavedBytes, &parameters_);
    const bool leaves = kind == TensorKind::kActivation || kind == TensorKind::kHeldLeaf;
    return std::make_unique<Handle>(leaves ? shared_from_this() : nullptr, DetachedAlias(tensor));
  }

  void BeginStep() { trace_.events.push_back({}); }
  const AllocationTrace& trace() const { return trace_; }

 private:
  class Handle : public SavedTensor {
   public:
    Handle(std::shared_ptr<Recorder> recorder, at::Tensor tensor)
        : recorder_(std::move(recorder)), tensor_(std::move(tensor)) {
      if (recorder_ != nullptr) recorder_->Save(tensor_);
    }
    ~Handle() override {
      if (recorder_ != nullptr) recorder_->LetGo(tensor_);
    }
    at::Tensor Unpack() override { return tensor_; }

   private:
    const std::shared_ptr<Recorder> recorder_;
    const at::Tensor tensor_;
  };

  struct Block {
    uint32_t number = 0;
    int handles = 0;
  };

  void Save(const at::Tensor& tensor) {
    MutexLock lock(mu_);
    Block& block = live_[tensor.storage().unsafeGetStorageImpl()];
    if (++block.handles > 1) return;
    if (free_.empty()) free_.push_back(trace_.blocks++);
    block.number = free_.back();
    free_.pop_back();
    trace_.events.push_back(
        {AllocationEvent::Kind::kAllocate, block.number, tensor.storage().nbytes()});
  }

  void LetGo(const at::Tensor& tensor) {
    MutexLock lock(mu_);
    const auto found = live_.find(tensor.storage().unsafeGetStorageImpl());
    if (--found->second.handles > 0) return;
    trace_.events.push_back({AllocationEvent::Kind::kFree, found->second.number});
    free_.push_back(found->second.number);
    live_.erase(found);
  }

  const ParameterStorages parameters_;
  Mutex mu_;  // handles may be freed on any thread
  AllocationTrace trace_;
  std::map<const c10::StorageImpl*, Block> live_;
  std::vector<uint32_t> free_;
};

using Loss = std::function<torch::Tensor(int64_t batch, int64_t sequence)>;

struct Model {
  std::vector<torch::Tensor> parameters;
  Loss loss;
  std::vector<int64_t> batches;
  std::vector<int64_t> sequences;
};

torch::Tensor Tokens(int64_t vocabulary, int64_t batch, int64_t sequence) {
  return torch::randint(vocabulary, {batch, sequence});
}

// GPT-2 small's shapes with a short vocabulary.
Model GptModel() {
  constexpr int64_t kVocabulary = 4096;
  Gpt gpt(GptConfig{.layers = 12,
                    .width = 768,
                    .heads = 12,
                    .sequence = 1024,
                    .batch = 4,
                    .vocabulary = kVocabulary,
                    .dropout = 0.1});
  const Loss loss = [gpt](int64_t batch, int64_t sequence) mutable {
    return torch::nn::functional::cross_entropy(
        gpt->forward(Tokens(kVocabulary, batch, sequence)).view({-1, kVocabulary}),
        Tokens(kVocabulary, batch, sequence).view(-1));
  };
  return {gpt->parameters(), loss, {1, 2, 3, 4}, {128, 197, 256, 384}};
}

// Batches of varying size and edge length through strided convolutions.
Model ConvNetModel() {
  torch::nn::Sequential net;
  int64_t channels = 3;
  for (const int64_t next : {32, 64, 128, 256}) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, next, 3).padding(1)));
    net->push_back(torch::nn::BatchNorm2d(next));
    net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::MaxPool2d(2));
    channels = next;
  }
  net->push_back(torch::nn::AdaptiveAvgPool2d(1));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(channels, 100));
  const Loss loss = [net](int64_t batch, int64_t edge) mutable {
    return torch::nn::functional::cross_entropy(net->forward(torch::randn({batch, 3, edge, edge})),
                                                Tokens(100, batch, 1).view(-1));
  };
  return {net->parameters(), loss, {8, 12, 16, 31}, {96, 112, 160, 224}};
}

Model LstmModel() {
  constexpr int64_t kVocabulary = 4096;
  constexpr int64_t kWidth = 512;
  torch::nn::Embedding embedding(kVocabulary, kWidth);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(kWidth, kWidth).num_layers(2).batch_first(true));
  torch::nn::Linear head(kWidth, kVocabulary);
  std::vector<torch::Tensor> parameters = embedding->parameters();
  for (const torch::nn::Module* module :
       {static_cast<torch::nn::Module*>(lstm.get()), static_cast<torch::nn::Module*>(head.get())}) {
    for (const torch::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
  }
  const Loss loss = [=](int64_t batch, int64_t sequence) mutable {
    const torch::Tensor hidden =
        std::get<0>(lstm->forward(embedding->forward(Tokens(kVocabulary, batch, sequence))));
    return torch::nn::functional::cross_entropy(head->forward(hidden).view({-1, kVocabulary}),
                                                Tokens(kVocabulary, batch, sequence).view(-1));
  };
  return {parameters, loss, {4, 7, 16}, {35, 64, 90}};
}

void Record() {
  const std::string name = absl::GetFlag(FLAGS_model);
  PINION_CHECK(name == "gpt" || name == "convnet" || name == "lstm") << "no model " << name;
  const Model model = name == "gpt" ? GptModel() : name == "lstm" ? LstmModel() : ConvNetModel();
  ParameterStorages parameters;
  for (const torch::Tensor& parameter : model.parameters) parameters.Add(parameter);
  const auto recorder = std::make_shared<Recorder>(std::move(parameters));
  std::mt19937 random(absl::GetFlag(FLAGS_seed));
  std::cout << "# " << name << ", float32; batch x sequence (or edge) of each step:";
  for (int step = 0; step < absl::GetFlag(FLAGS_steps); ++step) {
    const int64_t batch = model.batches[random() % model.batches.size()];
    const int64_t sequence = model.sequences[random() % model.sequences.size()];
    std::cout << " " << batch << "x" << sequence << std::flush;
    std::cerr << "step " << step + 1 << " of " << absl::GetFlag(FLAGS_steps) << "\n";
    recorder->BeginStep();
    torch::Tensor loss;
    {
      SavedTensorScope scope(recorder);
      loss = model.loss(batch, sequence);
    }
    loss.backward();
  }
  std::cout << "\n" << FormatAllocationTrace(recorder->trace());
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Records the host blocks of a few training steps to stdout.");
  pinion::ParseFlags(argc, argv);
  pinion::Record();
  return 0;
}
