// C functions of libpinion_torch.so for programs that cannot link Pinion, such as Python programs.
//
//   import ctypes, torch    # torch first: the library uses the LibTorch that is there
//   pinion = ctypes.CDLL("bazel-bin/shared/libpinion_torch.so")
//   install = pinion.pinion_install_torch_host_allocator
//   install.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double, ctypes.c_uint64]
//   pinion.pinion_last_error.restype = ctypes.c_char_p
//   if install(b"cuda", 64 << 30, 0, 0) != 0:
//       raise RuntimeError(pinion.pinion_last_error().decode())
//   torch.empty(1 << 20, pin_memory=True)    # from Pinion
//
// Without a loadable LibTorch each call fails with an error. libpinion_torch_impl.so must lie
// beside the library.
//
// The library works with the LibTorch release that it was built with; installing fails with others.
// It exports only these functions and is never unloaded.
//
// Thread safety: as hooks/pin_memory/torch_host_allocator.h: install before any use of pinned
// memory.

#ifndef PINION_SHARED_C_API_H_
#define PINION_SHARED_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Default of `segment_bytes`. It is smaller than in C++, since programs that cannot link Pinion pin
// little. Other programs make four pinning calls per GiB.
#define PINION_DEFAULT_SEGMENT_BYTES (UINT64_C(256) << 20)

// Puts Pinion's allocator behind LibTorch's pinned memory for `device_type`, "cuda".
// `max_locked_bytes`, `high_percent` and `segment_bytes` are those of
// allocator/allocator_options.h, 0 for a default; the other marks follow high_percent. Returns 0,
// or -1 and an error: LibTorch's own allocator then stays. With PINION_DISABLE=1 in the environment
// it stays too, and this is 0. PINION_LEDGER_DIRECTORY in the environment is
// AllocatorOptions::ledger_directory.
int pinion_install_torch_host_allocator(const char* device_type, uint64_t max_locked_bytes,
                                        double high_percent, uint64_t segment_bytes);

// Returns torch.cuda.host_memory_stats() as a JSON object of integers: bytes, calls and
// microseconds. NULL and an error if nothing is installed for the type.
const char* pinion_torch_host_memory_stats(const char* device_type);

// Returns the error of this thread's last call; empty after a success. This text and that of the
// statistics live until the thread's next call.
const char* pinion_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  // PINION_SHARED_C_API_H_
