"""Pinion's C++ rules: include paths that start with the project's name.

`//allocator:pinned_block` is included as "pinion/allocator/pinned_block.h",
inside this repository and in those that depend on it.
"""

def pinion_library(name, srcs = [], hdrs = [], **kwargs):
    native.cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        include_prefix = "pinion/" + native.package_name(),
        strip_include_prefix = "/" + native.package_name(),
        **kwargs
    )

# For what //tools/portable collects: libraries in the lib/ beside a program's folder come first,
# also for what those libraries load (which RUNPATH, the linker's default, leaves out).
PORTABLE_LINKOPTS = [
    "-Wl,--disable-new-dtags",
    "-Wl,-rpath,$$ORIGIN/../lib",
]

def pinion_test(name, srcs = None, deps = [], size = "small", **kwargs):
    """A GoogleTest binary of one source file, `<name>.cc` unless told otherwise."""
    native.cc_test(
        name = name,
        srcs = srcs or [name + ".cc"],
        size = size,
        deps = deps + ["@com_google_googletest//:gtest_main"],
        **kwargs
    )
