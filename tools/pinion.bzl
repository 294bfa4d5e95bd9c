"""Pinion's C++ rules: include paths that start with the project's name, and the library's folders
compiled as one file each.

A header of `//allocator` is included as "pinion/allocator/pinned_block.h", inside this repository
and in those that depend on it.

With `--//config:one_file`, which --config=opt gives, a folder of the library is one object, and so
is what the programs of one folder share, and so are the tests of a folder: a generated file includes
all their .cc files, so that the headers, which are what takes the time, are read once. Otherwise each
has an object of its own, which clang's layering check needs, and which builds faster after an edit.
The one file asks for two things: no name is used twice in the anonymous namespaces of a folder (a
test that needs one of another's names has a namespace that is named after its file), and no two
folders need each other's objects.
"""

_LAYERS = ["allocator", "device", "engine", "hooks"]

# Shared by programs, and one file each. //bench and //programs are not: the benchmark of the link
# uses parts of them, and would load LibTorch with the rest.
_PROGRAMS = [
    "bench/allocator",
    "bench/attribution",
    "bench/offload",
    "bench/peers",
    "bench/weights",
    "examples",
]

# Allowed in addition to srcs, hdrs and deps.
_LIBRARY_ARGUMENTS = ["deprecation", "linkopts", "tags", "visibility"]

def _standard():
    """The C++ standard: .bazelrc gives it here, and a repository that depends on this one need not."""
    return [] if native.repository_name() == "@" else ["-std=c++20"]

# Without this option GCC does not inline exported functions of position-independent code, which
# another library might replace. An allocation takes a fifth longer.
_INLINE = ["-fno-semantic-interposition"]

def _if_one_file(one_file, otherwise):
    return select({
        "//config:folders_are_one_file": one_file,
        "//conditions:default": otherwise,
    })

def pinion_library(name, srcs = [], hdrs = [], deps = [], alone = False, **kwargs):
    """A `cc_library`, of one component.

    One that is `alone` is an object of its own, for those that may not depend on the rest of its
    folder. Its siblings name it by its full label.
    """
    prefixes = {
        "include_prefix": "pinion/" + native.package_name(),
        "strip_include_prefix": "/" + native.package_name(),
    }
    package = native.package_name()
    if alone or (package.split("/")[0] not in _LAYERS and package not in _PROGRAMS):
        kwargs.update(prefixes)
        kwargs["copts"] = _standard() + _INLINE + kwargs.get("copts", [])
        native.cc_library(name = name, srcs = srcs, hdrs = hdrs, deps = deps, **kwargs)
        return

    # One file shares its compile options: those of one library would be lost.
    for argument in kwargs:
        if argument not in _LIBRARY_ARGUMENTS:
            fail("pinion_library %s: the folder's one file knows nothing of %s" % (name, argument))

    # The headers and dependencies of the folder's one file. Siblings are text as well: the one file
    # cannot depend on its own dependents.
    siblings = [label for label in deps if label.startswith(":")]
    others = [label for label in deps if not label.startswith(":")]
    text = name + "_text"
    native.cc_library(
        name = text,
        hdrs = hdrs,
        textual_hdrs = srcs,
        deps = others + [label + "_text" for label in siblings],
        linkopts = kwargs.get("linkopts", []),
        visibility = ["//visibility:private"],
        **prefixes
    )
    kwargs.update(prefixes)
    native.cc_library(
        name = name,
        srcs = _if_one_file([], srcs),
        hdrs = _if_one_file([], hdrs),
        deps = siblings + _if_one_file([":" + text] + ([":one_file"] if srcs else []), others),
        copts = _standard() + _INLINE,
        **kwargs
    )

# For //tools/portable: programs and their libraries look in the lib/ beside the program's folder
# first. RUNPATH, the linker's default, does not cover libraries of libraries.
PORTABLE_LINKOPTS = [
    "-Wl,--disable-new-dtags",
    "-Wl,-rpath,$$ORIGIN/../lib",
]

def one_file():
    """Ends the BUILD file of each folder of the library: the file that includes all .cc files."""
    _one_file("one_file", "_text")

def tests_in_one_file():
    """Ends the BUILD file of a folder that has a pinion_test: the file that includes all of them."""
    _one_file("tests_in_one_file", "_in_one_file", testonly = True, alwayslink = True)

    # All tests in one program, for //tools/portable.
    native.cc_binary(
        name = native.package_name().split("/")[-1] + "_tests",
        testonly = True,
        linkopts = PORTABLE_LINKOPTS,
        tags = ["manual"],
        visibility = ["//tools/portable:__pkg__"],
        deps = [
            ":tests_in_one_file",
            "//tests/support:roomy_host",
            "@com_google_googletest//:gtest_main",
        ],
    )

def _one_file(name, suffix, **kwargs):
    texts = [rule for part, rule in native.existing_rules().items() if part.endswith(suffix)]
    # Libraries of headers alone are included by other parts.
    parts = [text for text in texts if text.get("textual_hdrs")]
    _includes(
        name = name + "_source",
        testonly = kwargs.get("testonly", False),
        srcs = sorted([source for part in parts for source in part["textual_hdrs"]]),
        out = name + ".cc",
        visibility = ["//visibility:private"],
    )
    native.cc_library(
        name = name,
        srcs = [name + ".cc"],
        # gcc treats the included .cc files as headers whose types others would see. clang does not
        # know the warning.
        copts = _standard() + _INLINE + ["-Wno-subobject-linkage", "-Wno-unknown-warning-option"],
        deps = [":" + part["name"] for part in parts],
        # Not part of `//...`, which would compile everything twice.
        tags = ["manual"],
        visibility = ["//visibility:private"],
        **kwargs
    )

def _includes_impl(ctx):
    paths = ["%s/%s" % (source.label.package, source.label.name) for source in ctx.attr.srcs]
    ctx.actions.write(ctx.outputs.out, "".join(["#include \"%s\"\n" % path for path in paths]))

_includes = rule(
    implementation = _includes_impl,
    attrs = {
        "out": attr.output(mandatory = True),
        "srcs": attr.label_list(allow_files = [".cc"]),
    },
)

# Arguments that need a program of the test's own.
_PROGRAM_ARGUMENTS = ["linkopts", "linkstatic"]

# Models compile as fast with optimisation, and run faster (.bazelrc).
_OPTIMISED = ["_model_test", "_program_test"]

def pinion_test(name, deps = [], size = "medium", alone = False, **kwargs):
    """The GoogleTest program of `<name>.cc`.

    With `--//config:one_file` the tests of a folder are one library, and the program runs those of
    its file (tests/support/test_main.cc). Who replaces functions of the C library, runs tests that a
    header has, must be the first of the process to use something, or is optimised (.bazelrc), needs to
    be `alone`. The size leaves ten times what the test takes on a quiet machine: five minutes for half
    of one.
    """
    srcs = [name + ".cc"]
    for argument in _PROGRAM_ARGUMENTS:
        alone = alone or argument in kwargs
    for ending in _OPTIMISED:
        alone = alone or name.endswith(ending)
    if alone:
        deps = deps + ["@com_google_googletest//:gtest_main"]
    else:
        native.cc_library(
            name = name + "_in_one_file",
            testonly = True,
            textual_hdrs = srcs,
            deps = deps + ["@com_google_googletest//:gtest"],
            visibility = ["//visibility:private"],
        )
        srcs = _if_one_file([], srcs)
        deps = ["//tests/support:test_main"] + _if_one_file(
            [":tests_in_one_file"],
            deps + ["@com_google_googletest//:gtest"],
        )
    _on_roomy_host(name, deps, srcs = srcs, size = size, **kwargs)

def suites_test(name, deps, **kwargs):
    """The GoogleTest program of the suites that libraries have (alwayslink)."""
    _on_roomy_host(name, deps + ["@com_google_googletest//:gtest_main"], **kwargs)

# The only caller of cc_test (tools/check_structure.py).
def _on_roomy_host(name, deps, **kwargs):
    native.cc_test(name = name, deps = deps + ["//tests/support:roomy_host"], **kwargs)
