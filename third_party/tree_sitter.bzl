"""Finds tree-sitter and its C++ grammar, which tools/mutate parses with: Python wheels in .venv.

Target: @tree_sitter//:packages, a folder for PYTHONPATH named packages.
"""

_BUILD = """
filegroup(
    name = "packages",
    srcs = glob(["packages/**/*.py", "packages/**/*.so"]),
    visibility = ["//visibility:public"],
)
"""

def _tree_sitter_configure_impl(ctx):
    lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    for python in lib.readdir() if lib.exists else []:
        packages = python.get_child("site-packages")
        names = ["tree_sitter", "tree_sitter_cpp"]
        if all([packages.get_child(name).exists for name in names]):
            for name in names:
                ctx.symlink(packages.get_child(name), "packages/" + name)
            ctx.file("BUILD.bazel", _BUILD)
            return
    fail("tree-sitter was not found in .venv. Run ./bazelw, which installs the tree-sitter and tree-sitter-cpp wheels there.")

tree_sitter_configure = repository_rule(
    implementation = _tree_sitter_configure_impl,
    local = True,
)
