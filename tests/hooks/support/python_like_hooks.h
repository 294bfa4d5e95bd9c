// Imitates Python's saved-tensor hooks without Python: an engine that answers like Python's, and
// the context manager torch.autograd.graph.saved_tensors_hooks.
//
//   const PythonLikeEngineScope python;
//   {
//     const PythonHooks hooks;
//     y = at::exp(x);
//   }
//   EXPECT_EQ(python.packed(), 1);

#ifndef PINION_TESTS_HOOKS_SUPPORT_PYTHON_LIKE_HOOKS_H_
#define PINION_TESTS_HOOKS_SUPPORT_PYTHON_LIKE_HOOKS_H_

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>

#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion::testing {

// An engine that provides its own hooks while LibTorch's stack has some.
class PythonLikeEngine : public torch::autograd::Engine {
 public:
  ~PythonLikeEngine() override { stop(); }

  static PythonLikeEngine& Get() {
    static PythonLikeEngine* const engine = new PythonLikeEngine;
    return *engine;
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return Engine::get_base_engine().execute(roots, inputs, keep_graph, create_graph,
                                             accumulate_grad, outputs);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return nullptr;
    return std::make_unique<Hooks>(&packed);
  }

  std::atomic<int> packed = 0;

 private:
  class Hooks : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::atomic<int>* packed) : packed_(packed) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      ++*packed_;
      tensor_ = DetachedAlias(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    std::atomic<int>* const packed_;
    at::Tensor tensor_;
  };
};

// Makes this the process's engine for its lifetime.
class [[nodiscard]] PythonLikeEngineScope {
 public:
  [[nodiscard]] PythonLikeEngineScope() {
    Set();
    PythonLikeEngine::Get().packed = 0;
  }
  ~PythonLikeEngineScope() {
    torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  }
  PythonLikeEngineScope(const PythonLikeEngineScope&) = delete;
  PythonLikeEngineScope& operator=(const PythonLikeEngineScope&) = delete;

  static void Set() {
    torch::autograd::set_default_engine_stub(
        []() -> torch::autograd::Engine& { return PythonLikeEngine::Get(); });
  }
  int packed() const { return PythonLikeEngine::Get().packed; }
};

// Acts like the context manager.
class PythonHooks {
 public:
  PythonHooks() {
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(c10::SafePyObject(nullptr, nullptr),
                                            c10::SafePyObject(nullptr, nullptr));
  }
  ~PythonHooks() { at::SavedTensorDefaultHooks::pop_hooks(); }
  PythonHooks(const PythonHooks&) = delete;
  PythonHooks& operator=(const PythonHooks&) = delete;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_PYTHON_LIKE_HOOKS_H_
