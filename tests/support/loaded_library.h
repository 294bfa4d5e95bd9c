// Loads a shared library for the object's lifetime.
//
//   LoadedLibrary library("tests/allocator/libdlclose_plugin.so");
//   EXPECT_EQ(library.Call("UseTheAllocator"), 0);    // extern "C" int UseTheAllocator()
//   library.Close();
//   EXPECT_FALSE(LoadedLibrary::IsLoaded("tests/allocator/libdlclose_plugin.so"));
//
// Thread safety: thread-compatible.

#ifndef PINION_TESTS_SUPPORT_LOADED_LIBRARY_H_
#define PINION_TESTS_SUPPORT_LOADED_LIBRARY_H_

#include <dlfcn.h>

#include <string>
#include <utility>

#include "pinion/allocator/base/check.h"

namespace pinion::testing {

class LoadedLibrary {
 public:
  explicit LoadedLibrary(const std::string& path)
      : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    PINION_CHECK(handle_ != nullptr) << dlerror();
  }
  ~LoadedLibrary() { Close(); }
  LoadedLibrary(const LoadedLibrary&) = delete;
  LoadedLibrary& operator=(const LoadedLibrary&) = delete;

  int Call(const char* function) const {
    void* const symbol = dlsym(handle_, function);
    PINION_CHECK(symbol != nullptr) << dlerror();
    return reinterpret_cast<int (*)()>(symbol)();
  }

  void Close() {
    void* const handle = std::exchange(handle_, nullptr);
    if (handle != nullptr) PINION_CHECK(dlclose(handle) == 0) << dlerror();
  }

  static bool IsLoaded(const std::string& path) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (handle != nullptr) dlclose(handle);
    return handle != nullptr;
  }

 private:
  void* handle_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_LOADED_LIBRARY_H_
