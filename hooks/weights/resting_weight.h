// A frozen weight's bytes on the host in a narrower form, for the host to read and to change.
//
// Errors: c10::Error. Thread safety: none; nothing may copy from the parcel meanwhile.

#ifndef PINION_HOOKS_WEIGHTS_RESTING_WEIGHT_H_
#define PINION_HOOKS_WEIGHTS_RESTING_WEIGHT_H_

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>

#include "pinion/hooks/weights/frozen_form.h"
#include "pinion/hooks/weights/unit_parcel.h"

namespace pinion {

struct RestingWeight {
  std::shared_ptr<WeightParcel> parcel;
  uint64_t offset_bytes = 0;
  RestingForm form;
};

// What the device would see of it, in pageable memory.
c10::Storage WidenOnHost(const RestingWeight& weight);

// The weight is `wide`, as far as its form can hold that, if it was not so already.
void RestAgain(const RestingWeight& weight, const c10::Storage& wide, const std::string& name);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_RESTING_WEIGHT_H_
