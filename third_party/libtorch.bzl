"""Finds LibTorch: TORCH_PATH, else the torch wheel of TORCH_VERSION or the tested one in .venv.

Targets:
  @libtorch//:torch_cpu   headers, libc10 and libtorch_cpu: all that Pinion links
  @libtorch//:torch_cuda  libtorch_cuda as well, for programs on CUDA
  @libtorch//:libtorch_release   a file with "2.11", for what is to find the same LibTorch elsewhere
  @libtorch//:lib_dir     where the wheel's libraries are (PINION_TORCH_LIB_DIR), for tests that
                          look for the Python beside them
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

exports_files(["libtorch_release"])

cc_library(
    name = "torch_cpu",
    srcs = {libs},
    hdrs = glob(["torch/include/**/*.h", "torch/include/**/*.hpp", "torch/include/**/*.cuh"]),
    # The wheel is a release build: some c10 and ATen layouts differ without NDEBUG.
    defines = ["NDEBUG"],
    includes = [
        "torch/include",
        "torch/include/torch/csrc/api/include",
    ],
)

# Where it is, since it looks for CUDA's libraries beside itself. It registers itself, and no program
# names a symbol of it.
cc_library(
    name = "torch_cuda",
    linkopts = [
        "-Wl,--push-state,--no-as-needed,{lib_dir}/libtorch_cuda.so,--pop-state",
        "-Wl,-rpath,{lib_dir}",
    ],
    deps = [":torch_cpu"],
)

cc_library(
    name = "lib_dir",
    # An absolute path: on a target of its own, so that only its users' command lines hold it.
    defines = ["PINION_TORCH_LIB_DIR=\\\\\\"{lib_dir}\\\\\\""],
)
"""

_REMEDY = "Run ./bazelw, which installs the torch wheel into .venv, or set TORCH_PATH to a directory with include/ and lib/ of LibTorch."

def _torch_root(ctx):
    given = ctx.os.environ.get("TORCH_PATH", "")
    if given:
        if " " in given:
            fail("TORCH_PATH=%s has a space, which compiler flags cannot hold: name a link to it whose path has none" % given)
        root = ctx.path(given)
        if not root.get_child("include").get_child("c10").exists:
            fail("TORCH_PATH=%s has no include/c10. %s" % (given, _REMEDY))
        return root
    venv = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv")
    version = ctx.os.environ.get("TORCH_VERSION", "")
    lib = venv.get_child("lib")
    if version:
        roots = [venv.get_child("torch-" + version).get_child("torch")]
    elif lib.exists:
        roots = [python.get_child("site-packages").get_child("torch") for python in lib.readdir()]
    else:
        roots = []
    for root in roots:
        if root.get_child("include").get_child("c10").exists:
            return root
    fail("LibTorch was not found. " + _REMEDY)

def _release(ctx, root):
    header = root.get_child("include").get_child("torch").get_child("headeronly").get_child("version.h")
    if not header.exists:
        fail("%s is missing: Pinion needs LibTorch 2.11 or newer. %s" % (header, _REMEDY))
    numbers = {}
    for line in ctx.read(header).split("\n"):
        if line.startswith("#define TORCH_VERSION_M"):
            _, name, number = line.split(" ")
            numbers[name] = number
    return "%s.%s" % (numbers["TORCH_VERSION_MAJOR"], numbers["TORCH_VERSION_MINOR"])

def _libtorch_configure_impl(ctx):
    root = _torch_root(ctx)
    ctx.file("libtorch_release", _release(ctx, root) + "\n")
    ctx.symlink(root.get_child("include"), "torch/include")
    libs = []
    for name in ["libc10.so", "libtorch_cpu.so", "libgomp.so.1"]:
        path = root.get_child("lib").get_child(name)
        if path.exists:
            ctx.symlink(path, "torch/lib/" + name)
            libs.append("torch/lib/" + name)
        elif name != "libgomp.so.1":
            fail("%s is missing. %s" % (path, _REMEDY))

    # libtorch_cpu.so needs these two; a full install brings them as wheels.
    nvidia = root.dirname.get_child("nvidia").get_child("cu13").get_child("lib")
    for name in ["libcudart.so.13", "libcupti.so.13"]:
        path = nvidia.get_child(name)
        if path.exists:
            ctx.symlink(path, "nvidia/cu13/lib/" + name)
            libs.append("nvidia/cu13/lib/" + name)
    ctx.file("BUILD.bazel", _BUILD.format(libs = repr(libs), lib_dir = root.get_child("lib")))

libtorch_configure = repository_rule(
    implementation = _libtorch_configure_impl,
    local = True,
    environ = ["TORCH_PATH", "TORCH_VERSION"],
)
