"""Repositories over C++ libraries that Debian packages install under /usr.

The targets carry link options only: headers come from the compiler's default
search path. Their labels are the upstream ones, so a source build of a
dependency can replace one of these repositories without touching a BUILD file.
"""

def _require(ctx, header, packages):
    if not ctx.path(header).exists:
        fail("%s is missing. Run ./bazelw, or: apt-get install %s" % (header, packages))

def _library(name, linkopts):
    return "cc_library(name = %s, linkopts = %s)\n" % (repr(name), repr(linkopts))

_HEADER = "package(default_visibility = [\"//visibility:public\"])\n\n"

def _debian_library_impl(ctx):
    _require(ctx, ctx.attr.header, ctx.attr.packages)
    content = _HEADER
    for name, linkopts in ctx.attr.targets.items():
        content += _library(name, linkopts)
    ctx.file("BUILD.bazel", content)

debian_library = repository_rule(
    implementation = _debian_library_impl,
    local = True,
    attrs = {
        "header": attr.string(mandatory = True, doc = "a header that the packages install"),
        "packages": attr.string(mandatory = True, doc = "what to install when it is missing"),
        "targets": attr.string_list_dict(mandatory = True, doc = "target name -> link options"),
    },
)

# Package -> target -> libraries, direct and transitive, of Abseil 20220623.
_ABSL = {
    "base": {"core_headers": []},
    "cleanup": {"cleanup": []},
    "container": {
        "btree": ["throw_delegate", "raw_logging_internal"],
        "flat_hash_map": ["raw_hash_set", "hash"],
        "flat_hash_set": ["raw_hash_set", "hash"],
        "inlined_vector": ["throw_delegate"],
    },
    "debugging": {"symbolize": ["symbolize", "debugging_internal", "demangle_internal"]},
    "flags": {
        "commandlineflag": ["flags_commandlineflag"],
        "flag": ["flags_internal", "flags_reflection", "flags_marshalling", "flags_commandlineflag"],
        "parse": ["flags_parse"],
        "reflection": ["flags_reflection", "flags_commandlineflag"],
        "usage": ["flags_usage"],
    },
    "functional": {"function_ref": []},
    "status": {"status": ["status"], "statusor": ["statusor", "status"]},
    "strings": {"strings": ["strings", "throw_delegate"], "str_format": ["str_format_internal", "strings"]},
    "time": {"time": ["time"]},
    "types": {"span": []},
}

def _debian_absl_impl(ctx):
    _require(ctx, "/usr/include/absl/base/config.h", "libabsl-dev")
    for package, targets in _ABSL.items():
        content = _HEADER
        for name, libraries in targets.items():
            content += _library(name, ["-labsl_" + lib for lib in libraries])
        ctx.file("absl/%s/BUILD.bazel" % package, content)
    ctx.file("BUILD.bazel", "")

debian_absl = repository_rule(
    implementation = _debian_absl_impl,
    local = True,
    doc = "Abseil from Debian's libabsl-dev under Abseil's own labels.",
)
