// Finds a model's output head by name, so that an OffloadScope keeps its saved tensors on the
// device: backward reads them first.
//
//   const pinion::ModuleHeads heads = pinion::FindHeads(*model);    // once; logs if there is none
//   ...
//   pinion::OffloadScope scope(session, *model, heads);             // in each step
//
// Names and order are those of TRL's get_act_offloading_ctx_manager. The search starts in the
// submodule `module` if there is one, and in its `base_model` if that has a member `peft_config`
// beside it. The first registered name decides. If a parameter or buffer has one of the first three
// names, or `decoder` contains neither name, there is no head:
//
//   output
//   lm_head
//   decoder                             its `output`, else its `lm_head`
//   final_layer_norm, else ln_f
//   head
//
// Thread safety: FindHeads reads the module, which must not change meanwhile.
// Ownership: ModuleHeads shares the parts. Their parameters may be replaced or moved to another
// device later.

#ifndef PINION_HOOKS_ACTIVATIONS_MODULE_HEADS_H_
#define PINION_HOOKS_ACTIVATIONS_MODULE_HEADS_H_

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace pinion {

struct HeadOptions {
  // Submodules with one of these in their path, in any case, count as heads as well. Liger's fused
  // kernels save tensors that backward needs at once.
  std::vector<std::string> name_patterns = {"liger"};

  // Whether a module without a head is reported in the log, with the remedy.
  bool warn_if_no_head = true;
};

struct ModuleHeads {
  struct Part {
    std::string path;  // "decoder.lm_head", relative to the given module
    std::shared_ptr<torch::nn::Module> module;
  };

  std::vector<Part> parts;  // the head first, if there is one
};

// Throws c10::Error for an empty pattern.
ModuleHeads FindHeads(const torch::nn::Module& module, const HeadOptions& options = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_MODULE_HEADS_H_
