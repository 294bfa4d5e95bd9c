// Detects changes of a weight's host copy that the device does not know of.
//
//   MasterWatch watch("0.weight", master);
//   { at::NoGradGuard no_grad; master.zero_(); }
//   watch.HasChanged();   // true, until Accept()
//
// Operators that write raise the host copy's version. Writes through data(), as in LibTorch's SGD,
// do not, but change a sample of the bytes. The sample is compared after a backward and in a step.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_
#define PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace pinion {

class MasterWatch {
 public:
  MasterWatch(std::string name, const at::Tensor& master)
      : name_(std::move(name)),
        version_(master.unsafeGetTensorImpl()->version_counter()),
        storage_(master.storage()) {
    Accept();
  }

  bool HasNewVersion() const { return version_.current_version() != accepted_.load(kRelaxed); }
  bool HasChanged() const { return HasNewVersion() || Sample() != sample_.load(kRelaxed); }
  // Like HasChanged, but compares the sample only after NoteGradient.
  bool HasChangedInForward() const {
    return has_gradient_.load(kRelaxed) ? HasChanged() : HasNewVersion();
  }
  // The weight has a gradient: an optimizer may change the weight until Accept.
  void NoteGradient() { has_gradient_.store(true, kRelaxed); }
  // Takes the present value as the one that the device has.
  void Accept() {
    accepted_.store(version_.current_version(), kRelaxed);
    sample_.store(Sample(), kRelaxed);
    has_gradient_.store(false, kRelaxed);
  }

  const std::string& name() const { return name_; }

 private:
  static constexpr std::memory_order kRelaxed = std::memory_order_relaxed;

  // Returns a checksum of words spread over the storage.
  uint64_t Sample() const {
    constexpr size_t kWords = 16;
    uint64_t sum = 0;
    for (size_t i = 0; i < kWords; ++i) {
      const size_t begin = i * storage_.nbytes() / kWords;
      uint64_t word = 0;
      std::memcpy(&word, static_cast<const char*>(storage_.data()) + begin,
                  std::min(sizeof(word), storage_.nbytes() - begin));
      sum = (sum ^ word) * 0x9E3779B97F4A7C15;
    }
    return sum;
  }

  const std::string name_;
  const c10::VariableVersion version_;  // the master's own
  const c10::Storage storage_;          // the master's own
  std::atomic<uint32_t> accepted_ = 0;
  std::atomic<uint64_t> sample_ = 0;
  std::atomic<bool> has_gradient_ = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_
