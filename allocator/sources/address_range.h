// A reserved range of addresses, so that memory that is mapped in pieces is contiguous.
//
//   AddressRange range(64 * kGiB);
//   char* at = range.Take(kGiB);        // the lowest free addresses; map memory there
//   ...
//   range.Return(at);                   // nothing is mapped there any more
//
// Thread safety: thread-safe. Ownership: the destructor unmaps free addresses. Memory at other
// addresses stays mapped, because a device may be writing to it. A child of fork() does not inherit
// the range.

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
  // Begins at a multiple of 1 GiB. Empty if the system refuses so many addresses. Also empty under
  // a limit of address space (ulimit -v), which the rest of the program needs.
  explicit AddressRange(uint64_t size_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  // Returns null if no free part is long enough.
  char* Take(uint64_t size_bytes);
  // Returns all that one Take gave.
  void Return(char* data);

  bool Contains(const void* data) const { return data >= begin_ && data < end_; }

 private:
  const ForkOrigin origin_;
  char* begin_ = nullptr;
  char* end_ = nullptr;

  Mutex mu_;
  std::map<char*, uint64_t> taken_ ABSL_GUARDED_BY(mu_);  // bytes of each part, by address
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_ADDRESS_RANGE_H_
