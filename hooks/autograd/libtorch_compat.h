// What differs between the LibTorch releases that Pinion compiles for. No other file has code for
// single releases.
//
//   class CountingNode : public torch::autograd::Node { ... };
//   const NodePtr node = MakeNode<CountingNode>(gradient);
//   NodePtr reader = torch::autograd::get_current_node();
//
// | release | change | here |
// |---|---|---|
// | 2.12 | a device guard tells whether a stream captures | nothing: "emu" does not capture |
// | 2.13 | c10::intrusive_ptr owns autograd's nodes | NodeRef, MakeNode |
// | 2.14 | an engine provides Python's node creation hooks | ForwardingEngine |
// | 2.15 | nothing that Pinion uses | |
//
// For other changes of 2.13, one form of code suits all releases. New code must keep to it:
//
// * c10::DebugInfoKind is a class with constants in libc10. A copy in a constant of Pinion could be
//   read before it is initialised, so functions return kinds. Kinds cannot be enumerated.
// * A weak reference delays a node's destructor. Store none.
// * A node with a weak reference calls release_variables when its last owner goes. Nodes of a graph
//   reset their SavedVariables there.
// * DispatchKey::Fake marks fake tensors of C++, which are not plain (IsPlainTensor). KernelScope
//   uses the key, for which LibTorch has no kernel up to 2.15.
// * at::DimnameList is gone with named tensors.
//
// For a new release, compare the headers of each class that Pinion derives from. Nothing reports a
// new virtual function that a proxy does not forward.

#ifndef PINION_HOOKS_AUTOGRAD_LIBTORCH_COMPAT_H_
#define PINION_HOOKS_AUTOGRAD_LIBTORCH_COMPAT_H_

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>
#include <vector>

#define PINION_LIBTORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if PINION_LIBTORCH < 211
#error "Pinion needs LibTorch 2.11 or newer."
#elif PINION_LIBTORCH > 215 && !defined(PINION_ALLOW_UNKNOWN_LIBTORCH)
#error "Known are LibTorch 2.11 to 2.15. -DPINION_ALLOW_UNKNOWN_LIBTORCH compiles for newer ones."
#endif

namespace pinion {

// An owning reference to an autograd node of class T, and a new node.
#if PINION_LIBTORCH >= 213
template <typename T>
using NodeRef = c10::intrusive_ptr<T>;

template <typename T, typename... Arguments>
NodeRef<T> MakeNode(Arguments&&... arguments) {
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}
#else
template <typename T>
using NodeRef = std::shared_ptr<T>;

// The deleter frees a long graph without recursion.
template <typename T, typename... Arguments>
NodeRef<T> MakeNode(Arguments&&... arguments) {
  return NodeRef<T>(new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
}
#endif

using NodePtr = NodeRef<torch::autograd::Node>;

// An autograd engine that delegates to `previous`, which must outlive it.
class ForwardingEngine : public torch::autograd::Engine {
 public:
  explicit ForwardingEngine(Engine& previous) : previous_(previous) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return previous_.execute_with_graph_task(graph_task, std::move(graph_root),
                                             std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous_.make_anomaly_metadata();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return previous_.get_default_saved_variable_hooks();
  }

#if PINION_LIBTORCH >= 214
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks()
      override {
    return previous_.get_node_creation_hooks();
  }
#endif

 private:
  Engine& previous_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_AUTOGRAD_LIBTORCH_COMPAT_H_
