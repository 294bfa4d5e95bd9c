// Whether a weight's master in host memory was changed behind the device's back.
//
//   MasterWatch watch("0.weight", master);
//   { at::NoGradGuard no_grad; master.zero_(); }
//   watch.HasChanged();   // true, until Accept()
//
// A change is known by the master's version, which each operator that writes raises. What writes
// through data() or data_ptr() raises none and is not seen.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_
#define PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace pinion {

class MasterWatch {
 public:
  MasterWatch(std::string name, const at::Tensor& master)
      : name_(std::move(name)), version_(master.unsafeGetTensorImpl()->version_counter()) {
    Accept();
  }

  bool HasChanged() const {
    return version_.current_version() != accepted_.load(std::memory_order_relaxed);
  }
  // The device gets what is there now.
  void Accept() { accepted_.store(version_.current_version(), std::memory_order_relaxed); }

  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  const c10::VariableVersion version_;  // the master's own
  std::atomic<uint32_t> accepted_ = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_MASTER_WATCH_H_
