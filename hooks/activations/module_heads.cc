#include "pinion/hooks/activations/module_heads.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

using Part = ModuleHeads::Part;

// A registered member of a module.
struct Member {
  bool exists = false;
  std::shared_ptr<torch::nn::Module> module;  // null: a parameter, a buffer or an empty holder
};

Member MemberOf(const torch::nn::Module& module, const std::string& name) {
  const auto children = module.named_children();
  if (const auto* child = children.find(name)) return {true, *child};
  return {module.named_parameters(/*recurse=*/false).contains(name) ||
              module.named_buffers(/*recurse=*/false).contains(name),
          nullptr};
}

std::string Join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

// Returns the first of `names` that is a submodule.
std::optional<Part> FirstOf(const torch::nn::Module& module, const std::string& path,
                            std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (Member member = MemberOf(module, name); member.module != nullptr) {
      return Part{Join(path, name), std::move(member.module)};
    }
  }
  return std::nullopt;
}

std::optional<Part> FindHead(const torch::nn::Module& module, const std::string& path) {
  for (const char* name : {"output", "lm_head"}) {
    if (MemberOf(module, name).exists) return FirstOf(module, path, {name});
  }
  if (const Member decoder = MemberOf(module, "decoder"); decoder.exists) {
    if (decoder.module == nullptr) return std::nullopt;
    return FirstOf(*decoder.module, Join(path, "decoder"), {"output", "lm_head"});
  }
  return FirstOf(module, path, {"final_layer_norm", "ln_f", "head"});
}

bool ContainsAny(const std::string& path, const std::vector<std::string>& patterns) {
  const std::string lower = absl::AsciiStrToLower(path);
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return absl::StrContains(lower, absl::AsciiStrToLower(pattern));
  });
}

}  // namespace

ModuleHeads FindHeads(const torch::nn::Module& module, const HeadOptions& options) {
  for (const std::string& pattern : options.name_patterns) {
    TORCH_CHECK(!pattern.empty(),
                "HeadOptions::name_patterns has \"\", which every submodule's path has in it: "
                "nothing would be offloaded. Leave name_patterns empty for none");
  }
  const torch::nn::Module* inner = &module;
  std::string path;
  const auto enter = [&](const char* name) {
    const Member member = MemberOf(*inner, name);
    if (member.module == nullptr) return;
    inner = member.module.get();  // owned by its parent
    path = Join(path, name);
  };
  enter("module");
  if (MemberOf(*inner, "peft_config").exists) enter("base_model");

  ModuleHeads heads;
  if (std::optional<Part> head = FindHead(*inner, path)) {
    heads.parts.push_back(*std::move(head));
  } else if (options.warn_if_no_head) {
    PINION_LOG(kWarning)
        << "FindHeads: no submodule is an output head (output, lm_head, decoder.output, "
           "decoder.lm_head, final_layer_norm, ln_f, head). If the model has one, what it saves is "
           "offloaded although backward needs it first, which costs time. Register it as `output`, "
           "or wrap it in pinion::nn::NoOffload, or set HeadOptions::warn_if_no_head to false";
  }
  for (const auto& [name, submodule] : inner->named_modules("", /*include_self=*/false).pairs()) {
    if (ContainsAny(name, options.name_patterns)) {
      heads.parts.push_back({Join(path, name), submodule});
    }
  }
  return heads;
}

}  // namespace pinion
