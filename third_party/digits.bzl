"""Finds the pictures of digits that an example learns: in scikit-learn's wheel in .venv.

Target: @digits//:digits.csv.gz, the test set of UCI's "Optical Recognition of Handwritten Digits"
(E. Alpaydin and C. Kaynak, CC BY 4.0): a line for each of 1,797 pictures, its 8 x 8 pixels from 0 to
16 row by row, then the digit.
"""

def _digits_configure_impl(ctx):
    lib = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    for python in lib.readdir() if lib.exists else []:
        digits = ctx.path("%s/site-packages/sklearn/datasets/data/digits.csv.gz" % python)
        if digits.exists:
            ctx.symlink(digits, "digits.csv.gz")
            ctx.file("BUILD.bazel", "exports_files([\"digits.csv.gz\"])\n")
            return
    fail("The pictures of digits were not found in .venv. Run ./bazelw, which installs the scikit-learn wheel there.")

digits_configure = repository_rule(
    implementation = _digits_configure_impl,
    local = True,
)
