// Addresses that are set aside, so that memory which is mapped piece by piece lies side by side.
//
//   AddressRange range(64 * kGiB);
//   char* at = range.Take(kGiB);        // the lowest that are free; map memory there
//   ...
//   range.Return(at, kGiB);             // nothing is mapped there any more
//
// Thread safety: thread-safe.
// Ownership: gives the addresses back that were returned; what is mapped at the others stays (a
// device may still be writing there). None in a child of fork(), which does not inherit them.

#ifndef PINION_ALLOCATOR_SOURCES_ADDRESS_RANGE_H_
#define PINION_ALLOCATOR_SOURCES_ADDRESS_RANGE_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {

class AddressRange {
 public:
  // Begins at a multiple of 1 GiB. Empty where the system does not give so many addresses away, and
  // where it limits them (ulimit -v), because the rest of the program would lack what is set aside.
  explicit AddressRange(uint64_t size_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  // Null if no stretch is long enough.
  char* Take(uint64_t size_bytes);
  void Return(char* data, uint64_t size_bytes);

  bool Contains(const void* data) const { return data >= begin_ && data < end_; }

 private:
  const ForkOrigin origin_;
  char* begin_ = nullptr;
  char* end_ = nullptr;

  Mutex mu_;
  std::map<char*, uint64_t> free_ ABSL_GUARDED_BY(mu_);  // no two touch
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_ADDRESS_RANGE_H_
