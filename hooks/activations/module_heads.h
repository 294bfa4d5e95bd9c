// The parts of a module whose saved tensors are best left on the device, by their names: the output
// head, which backward reads first, and whatever else a pattern names.
//
//   const pinion::ModuleHeads heads = pinion::FindHeads(*model);    // once; warns if there is none
//   ...
//   pinion::OffloadScope scope(session, *model, heads);             // in each step
//
// The list of names and its order are those of TRL's get_act_offloading_ctx_manager, and so is
// where it looks: in the submodule `module` if there is one, and from there in `base_model` if
// something called `peft_config` (a submodule, a parameter or a buffer) lies beside that. The first
// of these names that is registered decides. A parameter or a buffer by one of the first three
// names ends the search without a head, and so does a decoder without either:
//
//   output
//   lm_head
//   decoder                             its `output`, else its `lm_head`
//   final_layer_norm, else ln_f
//   head
//
// Thread safety: FindHeads reads the module, which nobody may change meanwhile.
// Ownership: ModuleHeads shares ownership of the parts, so they may be given other parameters or
// moved to another device later.

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
  // Submodules whose path has one of these in it, in upper or lower case, count as heads as well.
  // Liger's fused kernels save what backward needs at once.
  std::vector<std::string> name_patterns = {"liger"};

  // Whether the log is told of a module that has no head, with the remedy.
  bool warn_if_no_head = true;
};

struct ModuleHeads {
  struct Part {
    std::string path;  // "decoder.lm_head", from the module that was given
    std::shared_ptr<torch::nn::Module> module;
  };

  std::vector<Part> parts;  // the head first, if there is one
  bool has_head = false;    // otherwise all parts are there by a pattern
};

ModuleHeads FindHeads(const torch::nn::Module& module, const HeadOptions& options = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_MODULE_HEADS_H_
