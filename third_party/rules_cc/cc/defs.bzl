"""The native C++ rules under the labels that Bazel's own tools load them from.

Debian's rules_cc needs a newer Bazel than Debian's bazel-bootstrap.
"""

cc_library = native.cc_library
cc_binary = native.cc_binary
cc_test = native.cc_test
cc_import = native.cc_import
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
