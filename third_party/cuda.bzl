"""Finds CUDA 13's runtime headers and shared runtime: CUDA_PATH, a toolkit, else the wheel.

Target: @local_config_cuda//:cudart (headers and libcudart.so.13; never the static runtime,
since libtorch_cpu loads the shared one anyway and two runtimes in a process do not see
each other's state).
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart",
    srcs = ["lib/libcudart.so.13"],
    hdrs = glob(["include/**/*.h", "include/**/*.hpp"]),
    includes = ["include"],
)
"""

_REMEDY = "Run ./bazelw, which installs the nvidia-cuda-runtime wheel into .venv, or install a CUDA Toolkit 13 and set CUDA_PATH."

def _is_cuda13(ctx, include):
    header = include.get_child("cuda_runtime_api.h")
    return header.exists and "#define CUDART_VERSION  13" in ctx.read(header)

def _candidates(ctx):
    given = ctx.os.environ.get("CUDA_PATH", "")
    roots = [given] if given else ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-13.0"]
    found = [(ctx.path(root), "lib64") for root in roots]
    if not given:
        lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
        if lib.exists:
            for python in lib.readdir():
                found.append((python.get_child("site-packages").get_child("nvidia").get_child("cu13"), "lib"))
    return found

def _cuda_configure_impl(ctx):
    for root, lib in _candidates(ctx):
        include = root.get_child("include")
        runtime = root.get_child(lib).get_child("libcudart.so.13")
        if _is_cuda13(ctx, include) and runtime.exists:
            ctx.symlink(include, "include")
            ctx.symlink(runtime, "lib/libcudart.so.13")
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
