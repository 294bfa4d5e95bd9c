"""What Pinion is built from, for the WORKSPACE of this repository and of those that depend on it.

    load("@pinion//:pinion_deps.bzl", "pinion_deps")

    pinion_deps()

Nothing is downloaded: every repository is a view of what this repository's ./bazelw has installed
(Debian packages, and wheels in .venv), or of the LibTorch and CUDA that TORCH_PATH and CUDA_PATH
name. One that the WORKSPACE has declared before under the same name is left as it is.
"""

load("//third_party:cuda.bzl", "cuda_configure")
load("//third_party:debian.bzl", "debian_absl", "debian_library")
load("//third_party:libtorch.bzl", "libtorch_configure")

def _declare(rule, name, **kwargs):
    if not native.existing_rule(name):
        rule(name = name, **kwargs)

def pinion_deps():
    """Declares the repositories. Those that a program does not need are not looked for."""

    # What Debian's Bazel looks for on the network by itself.
    for name in ["rules_cc", "remote_coverage_tools"]:
        _declare(_in_third_party, name = name)
    _declare(native.local_repository, name = "rules_java", path = "/usr/share/bazel/rules/java")

    _declare(debian_absl, name = "com_google_absl")
    _declare(
        debian_library,
        name = "nlohmann_json",
        header = "/usr/include/nlohmann/json.hpp",
        packages = "nlohmann-json3-dev",
        targets = {"json": []},
    )
    _declare(libtorch_configure, name = "libtorch")
    _declare(cuda_configure, name = "local_config_cuda")

def _in_third_party_impl(ctx):
    third_party = ctx.path(Label("//third_party:BUILD.bazel")).dirname
    for entry in third_party.get_child(ctx.name).readdir():
        ctx.symlink(entry, entry.basename)

_in_third_party = repository_rule(
    implementation = _in_third_party_impl,
    local = True,
    doc = "third_party/NAME, wherever this repository is.",
)
