"""Finds CUDA 13's runtime headers and shared runtime: CUDA_PATH, a toolkit, else the wheel.

Targets:
  @local_config_cuda//:cudart   headers and libcudart.so.13; never the static runtime, since
                                libtorch_cpu loads the shared one anyway and two runtimes in a
                                process do not see each other's state
  @local_config_cuda//:nvtx     NVTX 3's headers, from the same places; there is no library
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart",
    srcs = ["lib/libcudart.so.13"],
    hdrs = glob(
        ["include/**/*.h", "include/**/*.hpp"],
        exclude = ["include/nvtx3/**"],
    ),
    includes = ["include"],
)

cc_library(
    name = "nvtx",
    hdrs = glob(["nvtx/nvtx3/**/*.h"]),
    includes = ["nvtx"],
    linkopts = ["-ldl"],
)
"""

_REMEDY = "Run ./bazelw, which installs the wheels nvidia-cuda-runtime and nvidia-cuda-crt into .venv, or install a CUDA Toolkit 13 and set CUDA_PATH. A CUDA_PATH of another version is in the way: unset it."

_NVTX_REMEDY = "Run ./bazelw, which installs the nvidia-nvtx wheel into .venv, or install the toolkit's NVTX (cuda-nvtx-13-0)."

def _is_cuda13(ctx, include):
    header = include.get_child("cuda_runtime_api.h")

    # The runtime's headers include some of the compiler's, which are in a wheel of their own.
    has_compilers = include.get_child("crt").get_child("host_defines.h").exists
    return has_compilers and header.exists and "#define CUDART_VERSION  13" in ctx.read(header)

_TOOLKITS = ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-13.0"]

def _wheels(ctx):
    lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    if not lib.exists:
        return []
    return [
        python.get_child("site-packages").get_child("nvidia").get_child("cu13")
        for python in lib.readdir()
    ]

def _candidates(ctx):
    given = ctx.os.environ.get("CUDA_PATH", "")
    roots = [ctx.path(given)] if given else [ctx.path(root) for root in _TOOLKITS] + _wheels(ctx)
    return [(root, lib) for root in roots for lib in ("lib64", "lib")]

# Not every toolkit has them, nor has every program that sets CUDA_PATH.
def _link_nvtx(ctx):
    given = ctx.os.environ.get("CUDA_PATH", "")
    roots = [ctx.path(root) for root in ([given] if given else []) + _TOOLKITS] + _wheels(ctx)
    for root in roots:
        nvtx = root.get_child("include").get_child("nvtx3")
        if nvtx.get_child("nvToolsExt.h").exists:
            ctx.symlink(nvtx, "nvtx/nvtx3")
            return
    fail("NVTX 3's headers were not found (looked at %s). %s" % (
        ", ".join([str(root) for root in roots]),
        _NVTX_REMEDY,
    ))

def _cuda_configure_impl(ctx):
    for root, lib in _candidates(ctx):
        include = root.get_child("include")
        runtime = root.get_child(lib).get_child("libcudart.so.13")
        if _is_cuda13(ctx, include) and runtime.exists:
            ctx.symlink(include, "include")
            ctx.symlink(runtime, "lib/libcudart.so.13")
            _link_nvtx(ctx)
            ctx.file("BUILD.bazel", _BUILD)
            return
    fail("CUDA 13's runtime was not found (looked at %s). %s" % (
        ", ".join([str(root) for root, _ in _candidates(ctx)]),
        _REMEDY,
    ))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    local = True,
    environ = ["CUDA_PATH"],
)
