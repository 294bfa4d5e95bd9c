// Imitates a NUMA host: replaces get_mempolicy(2) and mbind(2) while the object exists, and
// move_pages(2) if node_of_page is set.
//
//   FakeNumaCalls calls;
//   calls.policy = MPOL_BIND;
//   calls.policy_nodes = {1};
//   EXPECT_EQ(host.Probe().Sample().limited_by, ...);
//
// Replaces a function of the C library: include it in one file of a test that is `alone`. At most
// one object may exist.

#ifndef PINION_TESTS_SUPPORT_FAKE_NUMA_CALLS_H_
#define PINION_TESTS_SUPPORT_FAKE_NUMA_CALLS_H_

#include <dlfcn.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <functional>
#include <vector>

namespace pinion::testing {

class FakeNumaCalls {
 public:
  FakeNumaCalls() { current_ = this; }
  ~FakeNumaCalls() { current_ = nullptr; }
  FakeNumaCalls(const FakeNumaCalls&) = delete;
  FakeNumaCalls& operator=(const FakeNumaCalls&) = delete;

  static FakeNumaCalls* current() { return current_; }

  long Answer(long number, const long* arguments) {
    ++count;
    errno = error;
    if (error != 0) return -1;
    // The kernel uses one bit less than the given size.
    if (number == SYS_mbind) {
      mbind_bytes = static_cast<uint64_t>(arguments[1]);
      mbind_nodes.clear();
      const auto* words = reinterpret_cast<const unsigned long*>(arguments[3]);
      for (long bit = 0; bit + 1 < arguments[4]; ++bit) {
        if (words[bit / 64] >> (bit % 64) & 1) mbind_nodes.push_back(static_cast<int>(bit));
      }
      return 0;
    }
    if (number == SYS_move_pages) {
      auto* const* pages = reinterpret_cast<void* const*>(arguments[2]);
      auto* const nodes = reinterpret_cast<int*>(arguments[4]);
      for (long i = 0; i < arguments[1]; ++i) nodes[i] = node_of_page(pages[i]);
      return 0;
    }
    errno = EINVAL;
    if (arguments[2] - 1 < 1024) return -1;  // less than a kernel may have
    *reinterpret_cast<int*>(arguments[0]) = policy;
    auto* words = reinterpret_cast<unsigned long*>(arguments[1]);
    for (const int node : policy_nodes) words[node / 64] |= 1ul << (node % 64);
    return 0;
  }

  std::atomic<int> count = 0;  // replaced calls
  int error = 0;               // errno of all; 0: success
  int policy = MPOL_DEFAULT;   // policy of every thread, with its flags
  std::vector<int> policy_nodes;
  uint64_t mbind_bytes = 0;      // range of the last call
  std::vector<int> mbind_nodes;  // nodes of the last call
  // Returns the node of a page, or -errno. Null: the kernel tells.
  std::function<int(const void* page)> node_of_page;

 private:
  static inline FakeNumaCalls* current_ = nullptr;
};

}  // namespace pinion::testing

extern "C" long syscall(long number, ...) noexcept {
  static const auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  auto* const fake = pinion::testing::FakeNumaCalls::current();
  if (fake != nullptr && (number == SYS_mbind || number == SYS_get_mempolicy ||
                          (number == SYS_move_pages && fake->node_of_page != nullptr))) {
    return fake->Answer(number, arguments);
  }
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
              arguments[5]);
}

#endif  // PINION_TESTS_SUPPORT_FAKE_NUMA_CALLS_H_
