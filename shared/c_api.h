// What programs call that cannot link Pinion, such as Python: the functions of libpinion_torch.so.
//
//   import ctypes, torch    # torch first: the library uses the LibTorch that is there
//   pinion = ctypes.CDLL("bazel-bin/shared/libpinion_torch.so")
//   install = pinion.pinion_install_torch_host_allocator
//   install.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double]
//   pinion.pinion_last_error.restype = ctypes.c_char_p
//   if install(b"cuda", 64 << 30, 0) != 0:
//       raise RuntimeError(pinion.pinion_last_error().decode())
//   torch.empty(1 << 20, pin_memory=True)    # from Pinion
//
// The library is for the release of LibTorch that it was built with; beside another one its
// behaviour is undefined. It exports these functions alone, and is never unloaded.
//
// Thread safety: as hooks/torch_host_allocator.h: install before others use pinned memory.

#ifndef PINION_SHARED_C_API_H_
#define PINION_SHARED_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Puts Pinion's allocator behind LibTorch's pinned memory for `device_type`, "cuda".
// `max_locked_bytes` and `high_percent` are those of allocator/allocator_options.h, 0 for their
// defaults; the other marks follow high_percent. Returns 0, or -1 and an error: LibTorch's own
// allocator then stays.
int pinion_install_torch_host_allocator(const char* device_type, uint64_t max_locked_bytes,
                                        double high_percent);

// Statistics as a JSON object under the names of torch.cuda.host_memory_stats(): integers, of
// bytes, calls and microseconds, since the installation. NULL and an error where nothing is
// installed for the type.
const char* pinion_torch_host_memory_stats(const char* device_type);

// Why this thread's last call failed; empty if it did not. This text and that of the statistics
// stay until the thread's next call.
const char* pinion_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  // PINION_SHARED_C_API_H_
