#include "pinion/hooks/emulated/emu_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <utility>

#include "pinion/hooks/emulated/emu_state.h"

namespace pinion::emu {
namespace {

class EmuGenerator final : public c10::GeneratorImpl {
 public:
  EmuGenerator(c10::DeviceIndex index, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kEmu, index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  EmuGenerator* clone_impl() const override {
    return new EmuGenerator(device().index(), host_.clone());
  }

  at::Generator host_;
};

std::array<at::Generator, kMaxDevices> MakeDefaultGenerators() {
  std::array<at::Generator, kMaxDevices> generators;
  for (int index = 0; index < kMaxDevices; ++index) {
    generators[index] = NewGenerator(static_cast<c10::DeviceIndex>(index));
  }
  return generators;
}

}  // namespace

at::Generator NewGenerator(c10::DeviceIndex index) {
  return at::Generator(c10::make_intrusive<EmuGenerator>(index, at::detail::createCPUGenerator()));
}

const at::Generator& DefaultGenerator(c10::DeviceIndex index) {
  static const auto* const generators =
      new std::array<at::Generator, kMaxDevices>(MakeDefaultGenerators());
  return generators->at(IndexOf(c10::Device(kEmu, index)));
}

const at::Generator& HostGeneratorOf(const at::Generator& generator) {
  return static_cast<const EmuGenerator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace pinion::emu
