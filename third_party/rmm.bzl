"""Finds RMM, which the allocator's benchmark runs beside Pinion: the librmm wheel in .venv.

Target: @rmm//:rmm (headers with CCCL, librmm.so and what it loads). Nothing of the library itself
depends on it.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "rmm",
    srcs = ["lib/librmm.so", "lib/librapids_logger.so"],
    hdrs = glob(["include/**/*"]),
    includes = ["include", "include/rapids", "logger"],
    textual_hdrs = glob(["logger/**/*"]),
)
"""

def _rmm_configure_impl(ctx):
    lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    for python in lib.readdir() if lib.exists else []:
        packages = python.get_child("site-packages")
        rmm = packages.get_child("librmm")
        logger = packages.get_child("rapids_logger")
        if rmm.exists and logger.exists:
            ctx.symlink(rmm.get_child("include"), "include")
            ctx.symlink(logger.get_child("include"), "logger")
            ctx.symlink(rmm.get_child("lib64").get_child("librmm.so"), "lib/librmm.so")
            ctx.symlink(logger.get_child("lib64").get_child("librapids_logger.so"), "lib/librapids_logger.so")
            ctx.file("BUILD.bazel", _BUILD)
            return
    fail("RMM was not found in .venv. Run ./bazelw, which installs the librmm-cu13 wheel there.")

rmm_configure = repository_rule(
    implementation = _rmm_configure_impl,
    local = True,
)
