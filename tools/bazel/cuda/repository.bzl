"""The @cuda repository: a view of the installed toolkit, or an empty one where there is none."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# For host code that calls the runtime API. cccl/ is left out: thousands of files which only nvcc
# uses, and nvcc finds them by itself.
cc_library(
    name = "headers",
    hdrs = glob(
        ["include/*.h", "include/*.hpp", "include/crt/**", "include/cooperative_groups/**",
         "include/nvtx3/**", "include/nccl_device/**"],
    ),
    includes = ["include"],
)

# Static, so that a program starts on a machine that has no CUDA at all.
cc_library(
    name = "cudart_static",
    srcs = ["lib64/libcudart_static.a"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
)
"""

# The same labels without a toolkit, so that a select() on //tools/bazel/cuda:enabled still loads.
_EMPTY_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(name = "headers", target_compatible_with = ["@mla_prefill//tools/bazel/cuda:toolkit"])

cc_library(name = "cudart_static", target_compatible_with = ["@mla_prefill//tools/bazel/cuda:toolkit"])
"""

def _cuda_repository_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "") or "/usr/local/cuda"
    nvcc = ctx.path(home + "/bin/nvcc")
    found = nvcc.exists and ctx.path(home + "/include/cuda_runtime.h").exists

    version = "none"
    if found:
        lib = home + "/lib64"
        if not ctx.path(lib + "/libcudart_static.a").exists:
            lib = home + "/lib"
        ctx.symlink(home + "/include", "include")
        ctx.symlink(lib, "lib64")

        # The version is written down so that an upgraded toolkit recompiles the kernels.
        version = ctx.execute([nvcc, "--version"]).stdout
    ctx.file("BUILD", _BUILD if found else _EMPTY_BUILD)
    ctx.file("toolkit.bzl", "CUDA_FOUND = {}\nNVCC = {}\nCUDA_VERSION = {}\n".format(
        found,
        repr(str(nvcc)) if found else repr(""),
        repr(version),
    ))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    doc = "Finds CUDA in $CUDA_HOME, else in /usr/local/cuda; without it makes an empty repository.",
    environ = ["CUDA_HOME"],
    configure = True,
    local = True,
)
