"""Tests of exact results with the CPU's kernels that other processors have (cpu_kernels.h)."""

_CHOICES = {
    "aten_avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "aten_avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "aten_default": {"ATEN_CPU_CAPABILITY": "default"},
    "onednn_avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "without_onednn": {"PINION_TEST_ONEDNN": "off"},
}

def with_other_kernels(name, test, args = [], size = "medium"):
    """The test binary `test` of this package, as "<name>_aten_avx2_test" and so on.

    None of them is a part of `//...`; the test_suite `name` is all of them. What needs a processor
    with AVX-512 is tagged requires-avx512.
    """
    names = {choice: "%s_%s_test" % (name, choice) for choice in _CHOICES}
    for choice, env in _CHOICES.items():
        native.sh_test(
            name = names[choice],
            size = size,
            srcs = ["//tests/hooks/support:run_test.sh"],
            args = ["$(rootpath %s)" % test] + args,
            data = [test],
            env = env,
            tags = ["manual"] + (["requires-avx512"] if choice == "aten_avx512" else []),
        )
    native.test_suite(
        name = name,
        tags = ["manual"],
        tests = names.values(),
        visibility = ["//tests/hooks:__pkg__"],
    )
