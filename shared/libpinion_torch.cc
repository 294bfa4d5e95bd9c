// The library that programs load. It loads without LibTorch and Abseil, and forwards calls to
// libpinion_torch_impl.so beside it. A program that has not loaded LibTorch gets a readable error
// instead of the loader's.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "pinion/shared/c_api.h"

namespace {

constexpr char kImplementation[] = "libpinion_torch_impl.so";

thread_local char last_error[1024] = "";

// Returns null and sets last_error if the implementation cannot be loaded.
void* Implementation() {
  last_error[0] = 0;
  Dl_info self = {};
  if (dladdr(reinterpret_cast<const void*>(&Implementation), &self) == 0) {
    std::snprintf(last_error, sizeof(last_error),
                  "Pinion cannot be loaded: the folder of this library is unknown");
    return nullptr;
  }
  const char* const slash = std::strrchr(self.dli_fname, '/');
  const int folder = slash == nullptr ? 0 : static_cast<int>(slash + 1 - self.dli_fname);
  char path[4096] = "";
  std::snprintf(path, sizeof(path), "%.*s%s", folder, self.dli_fname, kImplementation);
  // Retrying is cheap, and succeeds once the program has loaded LibTorch.
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::snprintf(last_error, sizeof(last_error),
                  "Pinion cannot be loaded: %s. It uses the LibTorch that the program has loaded: "
                  "in Python, `import torch` first",
                  dlerror());
  }
  return library;
}

// Returns `function` of the implementation. Null as above, or if the implementation has another
// version.
template <typename Function>
Function* Find(const char* name, Function* /*type*/) {
  void* const library = Implementation();
  if (library == nullptr) return nullptr;
  void* const function = dlsym(library, name);
  if (function == nullptr) {
    std::snprintf(last_error, sizeof(last_error), "%s has no function %s: it is of another version",
                  kImplementation, name);
  }
  return reinterpret_cast<Function*>(function);
}

}  // namespace

int pinion_install_torch_host_allocator(const char* device_type, uint64_t max_locked_bytes,
                                        double high_percent, uint64_t segment_bytes) {
  auto* const install =
      Find("pinion_install_torch_host_allocator", &pinion_install_torch_host_allocator);
  return install == nullptr ? -1
                            : install(device_type, max_locked_bytes, high_percent, segment_bytes);
}

const char* pinion_torch_host_memory_stats(const char* device_type) {
  auto* const stats = Find("pinion_torch_host_memory_stats", &pinion_torch_host_memory_stats);
  return stats == nullptr ? nullptr : stats(device_type);
}

const char* pinion_last_error() {
  if (last_error[0] != 0) return last_error;
  auto* const error = Find("pinion_last_error", &pinion_last_error);
  return error == nullptr ? last_error : error();
}
