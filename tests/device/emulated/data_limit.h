// Limits the writable private memory of the process, as strict overcommit does for all processes.

#ifndef PINION_TESTS_DEVICE_EMULATED_DATA_LIMIT_H_
#define PINION_TESTS_DEVICE_EMULATED_DATA_LIMIT_H_

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

#include "pinion/allocator/base/check.h"

namespace pinion::testing {

// Lets the process map `more_bytes` more than it has, during the object's lifetime.
class DataLimit {
 public:
  explicit DataLimit(uint64_t more_bytes) {
    PINION_CHECK(getrlimit(RLIMIT_DATA, &before_) == 0);
    uint64_t data_pages = 0;  // the sixth field, which counts stacks as well
    std::ifstream statm("/proc/self/statm");
    for (int field = 0; field < 6; ++field) statm >> data_pages;
    rlimit limit = before_;
    limit.rlim_cur = data_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + more_bytes;
    PINION_CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
  }
  ~DataLimit() { setrlimit(RLIMIT_DATA, &before_); }
  DataLimit(const DataLimit&) = delete;
  DataLimit& operator=(const DataLimit&) = delete;

 private:
  rlimit before_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_DEVICE_EMULATED_DATA_LIMIT_H_
