"""mla_test: a GoogleTest under the conventions of this tree."""

load("@rules_cc//cc:defs.bzl", "cc_test")

def mla_test(name, srcs, deps = [], sanitizer = False, size = "small", tags = [], **kwargs):
    """Declares a cc_test with GoogleTest's main.

    Args:
      name: target name.
      srcs: sources.
      deps: what is tested; gtest_main is added.
      sanitizer: whether --config=asan, ubsan and tsan run it; give it only to small shapes, which
        still take seconds when a sanitizer makes them ten times slower.
      size: Bazel's test size, which sets the time limit.
      tags: further tags.
      **kwargs: anything else that cc_test takes.
    """
    cc_test(
        name = name,
        size = size,
        srcs = srcs,
        tags = tags + (["sanitizer"] if sanitizer else []),
        deps = deps + ["//tools/bazel/deps:gtest_main"],
        **kwargs
    )
