#include "pinion/hooks/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/version.h>

#include <cstddef>
#include <latch>
#include <memory>
#include <thread>
#include <utility>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
#error "Pinion's hooks into autograd were checked against LibTorch 2.11 only."
#endif

namespace pinion {
namespace {

using torch::autograd::Engine;

// No other library uses this slot: LibTorch reserves it for its own tests.
constexpr c10::DebugInfoKind kScopeSlot = c10::DebugInfoKind::TEST_INFO_2;

struct ScopeInfo : public c10::DebugInfoBase {
  explicit ScopeInfo(std::shared_ptr<SavedTensorPacker> p) : packer(std::move(p)) {}
  std::shared_ptr<SavedTensorPacker> packer;
};

class Hooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<SavedTensorPacker> packer) : packer_(std::move(packer)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    saved_ = packer_->Pack(tensor);
    packer_.reset();
  }

  at::Tensor call_unpack_hook() override { return saved_->Unpack(); }

 private:
  std::shared_ptr<SavedTensorPacker> packer_;
  std::unique_ptr<SavedTensor> saved_;
};

// Delegates everything to the engine that was the default before (LibTorch's own, or Python's), so
// there is still one set of worker threads.
class ProxyEngine : public Engine {
 public:
  explicit ProxyEngine(Engine& previous) : previous_(previous) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return previous_.execute_with_graph_task(graph_task, std::move(graph_root),
                                             std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous_.make_anomaly_metadata();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* scope = static_cast<ScopeInfo*>(c10::ThreadLocalDebugInfo::get(kScopeSlot));
    if (scope != nullptr && scope->packer != nullptr && at::SavedTensorDefaultHooks::is_enabled()) {
      return std::make_unique<Hooks>(scope->packer);
    }
    return previous_.get_default_saved_variable_hooks();
  }

  Engine& previous() { return previous_; }

 private:
  Engine& previous_;
};

// Reaches what Engine keeps for classes that derive from it.
class Workers : public Engine {
 public:
  static void Start(Engine& engine, size_t device_count) {
    if (engine.*(&Workers::thread_pool_shared_) == nullptr) return;  // no backward has run
    auto& queues = engine.*(&Workers::device_ready_queues_);
    while (queues.size() < device_count) {
      const int device = static_cast<int>(queues.size());
      const auto queue = std::make_shared<torch::autograd::ReadyQueue>();
      queues.push_back(queue);
      // The engine's destructor waits for the threads that it has seen start.
      const auto started = std::make_shared<std::latch>(1);
      std::thread([&engine, device, queue, started] {
        started->count_down();
        engine.thread_init(device, queue);
      }).detach();
      started->wait();
    }
  }
};

ProxyEngine& TheProxy() {
  // Leaked: graphs may be destroyed by static destructors.
  static ProxyEngine* proxy = new ProxyEngine(Engine::get_default_engine());
  return *proxy;
}

void InstallProxy() {
  static const bool installed = [] {
    TheProxy();
    torch::autograd::set_default_engine_stub([]() -> Engine& { return TheProxy(); });
    return true;
  }();
  (void)installed;
}

std::shared_ptr<c10::DebugInfoBase> Activate(std::shared_ptr<SavedTensorPacker> packer) {
  InstallProxy();
  return std::make_shared<ScopeInfo>(std::move(packer));
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorPacker> packer)
    : guard_(kScopeSlot, Activate(std::move(packer))) {}

int64_t CurrentBackward() { return torch::autograd::get_current_graph_task_id(); }

uint64_t CurrentNode() { return at::sequence_number::peek(); }

void StartBackwardWorkers(int device_count) {
  Engine& engine = Engine::get_default_engine();
  auto* const proxy = dynamic_cast<ProxyEngine*>(&engine);
  Workers::Start(proxy != nullptr ? proxy->previous() : engine, static_cast<size_t>(device_count));
}

void AtEndOfBackward(std::function<void()> callback) {
  TORCH_CHECK(CurrentBackward() != -1, "AtEndOfBackward was called outside of a backward");
  Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace pinion
