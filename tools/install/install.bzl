"""A part of the library as one archive with its headers, for programs that Bazel does not build.

Bazel 4 has no cc_static_library, and the archive of a cc_library holds that library's own objects
only. So a pinion_part collects the objects of all libraries of this repository that it reaches, but
for those of the parts below it.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

PinionPartInfo = provider(fields = {
    "files": "dict of the part's objects and headers, those of the parts below it included",
})

def _objects(library, workspace):
    return [
        object
        for linker_input in library[CcInfo].linking_context.linker_inputs.to_list()
        if linker_input.owner.workspace_name == workspace
        for archive in linker_input.libraries
        # PIC objects can also go into shared libraries.
        for object in archive.pic_objects
    ]

def _headers(library, workspace):
    # Under _virtual_includes a header has its include path.
    return [
        header
        for header in library[CcInfo].compilation_context.headers.to_list()
        if header.owner.workspace_name == workspace and
           header.extension == "h" and "/_virtual_includes/" in header.path
    ]

def _pinion_part_impl(ctx):
    library = ctx.attr.library
    workspace = ctx.label.workspace_name
    below = {}
    for part in ctx.attr.below:
        below.update(part[PinionPartInfo].files)
    all_files = {file: None for file in _objects(library, workspace) + _headers(library, workspace)}
    own_files = [file for file in all_files if file not in below]

    toolchain = find_cpp_toolchain(ctx)
    folder = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable._collect,
        arguments = [folder.path, ctx.attr.archive, toolchain.ar_executable] +
                    [file.path for file in own_files],
        inputs = depset(own_files, transitive = [toolchain.all_files]),
        outputs = [folder],
        mnemonic = "PinionPart",
    )
    folders = depset([folder], transitive = [part[DefaultInfo].files for part in ctx.attr.below])
    return [
        DefaultInfo(files = folders, runfiles = ctx.runfiles(transitive_files = folders)),
        PinionPartInfo(files = dict(below.items() + all_files.items())),
    ]

pinion_part = rule(
    implementation = _pinion_part_impl,
    attrs = {
        "archive": attr.string(mandatory = True, doc = "the archive's name"),
        "below": attr.label_list(
            providers = [PinionPartInfo],
            doc = "parts that this one needs: its folder leaves out what they have",
        ),
        "library": attr.label(mandatory = True, providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_collect": attr.label(
            default = "//tools/install:collect.sh",
            allow_single_file = True,
            executable = True,
            cfg = "host",
        ),
    },
    doc = "A folder with lib/ARCHIVE and include/; and the folders of the parts below.",
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
