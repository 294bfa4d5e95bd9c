// A machine of two small devices, registered as "emu", for tests of the device itself.

#ifndef PINION_TESTS_HOOKS_EMULATED_EMU_DEVICE_FIXTURE_H_
#define PINION_TESTS_HOOKS_EMULATED_EMU_DEVICE_FIXTURE_H_

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/emulated/emu_device.h"
#include "pinion/tests/hooks/support/error_of.h"

namespace pinion {

class EmuDeviceTest : public ::testing::Test {
 protected:
  EmuDeviceTest() { Use(Options()); }

  static EmulatedOptions Options() {
    EmulatedOptions options;
    options.device_count = 2;
    options.memory_bytes = uint64_t{64} << 20;
    options.abort_on_race = false;
    return options;
  }

  void Use(const EmulatedOptions& options) {
    machine_ = EmulatedMachine::Create(options).value();
    ASSERT_TRUE(RegisterEmuDevice(machine_).ok());
  }

  static c10::Device Emu(int index = 0) {
    return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
  }
  static at::TensorOptions OnEmu(int index = 0) { return at::TensorOptions().device(Emu(index)); }
  static c10::Stream NewStream() {
    return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getNewStream(Emu());
  }
  static at::Tensor Pinned(at::IntArrayRef sizes) { return at::randn(sizes).pin_memory(); }

  std::shared_ptr<EmulatedMachine> machine_;
};

using testing::ErrorOf;

}  // namespace pinion

#endif  // PINION_TESTS_HOOKS_EMULATED_EMU_DEVICE_FIXTURE_H_
