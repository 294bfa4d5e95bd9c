#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/pack_scope.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

// Returns null, which switches hooks off, if the session is not enabled.
std::shared_ptr<PackTarget> TargetOf(const std::shared_ptr<OffloadSession>& session) {
  PINION_CHECK(session != nullptr)
      << "OffloadScope needs a session: pass what OffloadSession::Create has returned";
  if (!session->options().enabled) return nullptr;
  auto target = std::dynamic_pointer_cast<PackTarget>(session);
  PINION_CHECK(target != nullptr) << "this OffloadSession was not made by OffloadSession::Create";
  return target;
}

std::shared_ptr<PackScope> NewPackScope(PackTarget* target) {
  return std::make_shared<PackScope>(NewScopeId(),
                                     target == nullptr ? CastNotes() : target->NoteCasts());
}

ParameterStorages StoragesOf(const torch::nn::Module& module) {
  ParameterStorages storages;
  for (const at::Tensor& parameter : module.parameters()) storages.Add(parameter);
  for (const at::Tensor& buffer : module.buffers()) storages.Add(buffer);
  return storages;
}

// Returns null if there are no heads or the session ignores them.
std::unique_ptr<HeadNodes> NodesOf(const ModuleHeads& heads,
                                   const std::shared_ptr<OffloadSession>& session) {
  if (session == nullptr || heads.parts.empty()) return nullptr;
  ParameterStorages parameters;
  for (const ModuleHeads::Part& part : heads.parts) {
    TORCH_CHECK(part.module != nullptr, "the head \"", part.path,
                "\" has no module: fill ModuleHeads by FindHeads, or each part's module");
    for (const at::Tensor& parameter : part.module->parameters()) parameters.Add(parameter);
    for (const at::Tensor& buffer : part.module->buffers()) parameters.Add(buffer);
  }
  if (session->options().memory_target_bytes != OffloadOptions::kNoTarget) return nullptr;
  return std::make_unique<HeadNodes>(std::move(parameters));
}

// Users who open a scope in a checkpointed block mean the block's first forward.
void SayThatNothingLeavesInBackward() {
  static std::once_flag said;
  std::call_once(said, [] {
    PINION_LOG(kWarning)
        << "an OffloadScope was opened inside a backward, where a checkpoint computes a block "
           "again: what is saved there is needed at once and stays on the device "
           "(OffloadStats::kept_in_backward). Open the scope around the whole forward";
  });
}

}  // namespace

struct OffloadScope::State {
  State(const std::shared_ptr<OffloadSession>& session, ScopeModule module)
      : target(TargetOf(session)),
        outer(target == nullptr ? nullptr : target->OuterScope()),
        saved(outer != nullptr ? outer : NewPackScope(target.get())),
        range(target == nullptr ? nullptr : session->options().engine.trace.get(), "pinion.scope"),
        observed(target == nullptr || outer != nullptr ? nullptr : target->Observer()),
        scope(target == nullptr ? nullptr : target->NewPacker(std::move(module), saved),
              "OffloadScope") {
    if (target != nullptr && CurrentBackward() != -1) SayThatNothingLeavesInBackward();
  }
  ~State() {
    if (target == nullptr || outer != nullptr) return;
    saved->ended = true;
    RunAside([this] { target->EndScope(*saved); });
  }

  const std::shared_ptr<PackTarget> target;
  const std::shared_ptr<PackScope> outer;
  const std::shared_ptr<PackScope> saved;
  const ScopedRange range;
  const MemoryScope observed;
  const SavedTensorScope scope;
};

OffloadScope::OffloadScope(std::shared_ptr<OffloadSession> session)
    : state_(std::make_unique<State>(session, ScopeModule())) {}

OffloadScope::OffloadScope(std::shared_ptr<OffloadSession> session, const torch::nn::Module& module)
    : state_(std::make_unique<State>(session, ScopeModule{StoragesOf(module), nullptr})) {}

OffloadScope::OffloadScope(std::shared_ptr<OffloadSession> session, const torch::nn::Module& module,
                           const ModuleHeads& heads)
    : state_(std::make_unique<State>(session,
                                     ScopeModule{StoragesOf(module), NodesOf(heads, session)})) {}

OffloadScope::~OffloadScope() = default;

struct NoOffloadScope::State {
  const SavedTensorScope scope{nullptr, "NoOffloadScope"};
};

NoOffloadScope::NoOffloadScope() : state_(std::make_unique<State>()) {}

NoOffloadScope::~NoOffloadScope() = default;

}  // namespace pinion
