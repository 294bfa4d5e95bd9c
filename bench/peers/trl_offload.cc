#include "pinion/bench/peers/trl_offload.h"

#include <c10/util/Exception.h>

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/bench/peers/trl_state.h"

namespace pinion {
namespace {

class Saved : public SavedTensor {
 public:
  Saved(std::shared_ptr<TrlState> state, int64_t id) : state_(std::move(state)), id_(id) {}
  at::Tensor Unpack() override { return state_->Unpack(id_); }

 private:
  const std::shared_ptr<TrlState> state_;
  const int64_t id_;
};

}  // namespace

TrlOffload::TrlOffload(TrlOptions options, c10::Device device)
    : state_(std::make_shared<TrlState>(std::move(options), device)) {}

std::unique_ptr<SavedTensor> TrlOffload::Pack(const at::Tensor& tensor, const GraphPlace&) {
  return std::make_unique<Saved>(state_, state_->Pack(tensor));
}

PeerStats TrlOffload::GetStats() const { return state_->stats(); }

TrlScope::TrlScope(const std::shared_ptr<TrlOffload>& offload)
    : state_(offload->state_), scope_(offload) {
  state_->Enter();
}

TrlScope::~TrlScope() {
  try {
    state_->Exit();
  } catch (const c10::Error& error) {
    PINION_LOG(kError) << "ending a TrlScope: " << error.what_without_backtrace();
  }
}

}  // namespace pinion
