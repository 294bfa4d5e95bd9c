"""A library that a test loads and unloads."""

def test_plugin(name, srcs, deps):
    """The shared library lib<name>.so, with all of Pinion that it uses inside.

    It shows its functions whose names begin with Use, and nothing else: a name that it shared with
    the program could keep it loaded.
    """
    native.cc_binary(
        name = "lib" + name + ".so",
        testonly = True,
        srcs = srcs,
        additional_linker_inputs = ["//tests/support:plugin.lds"],
        linkopts = ["-Wl,--version-script=$(location //tests/support:plugin.lds)"],
        linkshared = True,
        deps = deps,
    )
