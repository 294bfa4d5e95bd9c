"""A folder of programs that runs where it is copied to."""

def _portable_folder_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    programs = ctx.files.programs
    libraries = ctx.files.libraries
    files = [(program, "libexec") for program in programs]
    files += [(library, "lib") for library in libraries]
    for target, place in ctx.attr.share.items():
        files += [(file, place) for file in target[DefaultInfo].files.to_list()]
    runfiles = [target[DefaultInfo].default_runfiles.files for target in ctx.attr.programs + ctx.attr.libraries]
    ctx.actions.run(
        executable = ctx.executable._collect,
        arguments = [folder.path, ctx.file._launcher.path] +
                    ["%s=%s" % (place, file.path) for file, place in files],
        inputs = depset([file for file, _ in files] + [ctx.file._launcher], transitive = runfiles),
        outputs = [folder],
        mnemonic = "PortableFolder",
    )
    return [DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles([folder]))]

portable_folder = rule(
    implementation = _portable_folder_impl,
    attrs = {
        "libraries": attr.label_list(doc = "shared libraries, linked with PORTABLE_LINKOPTS: into lib/"),
        "programs": attr.label_list(doc = "programs, linked with PORTABLE_LINKOPTS: into libexec/, started from bin/"),
        "share": attr.label_keyed_string_dict(allow_files = True, doc = "data, and the folder that it goes to"),
        "_collect": attr.label(
            default = "//tools/portable:collect.sh",
            allow_single_file = True,
            executable = True,
            cfg = "host",
        ),
        "_launcher": attr.label(default = "//tools/portable:launcher.sh", allow_single_file = True),
    },
    doc = "bin/, lib/, libexec/ and share/ with all that the programs need but LibTorch and the C++ runtime.",
)
