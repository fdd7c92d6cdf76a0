"""CUDA in BUILD files: cuda_library compiles kernels, if_cuda picks what needs a toolkit.

    load("//tools/bazel/cuda:defs.bzl", "CUDA_ONLY", "cuda_library", "if_cuda")

    cuda_library(name = "merge_cuda", srcs = ["merge.cu"], hdrs = ["merge_cuda.h"], deps = [...])

    cc_library(
        name = "backends",
        defines = if_cuda(["MLA_HAVE_CUDA=1"]),
        deps = [":cpu"] + if_cuda([":merge_cuda"]),
    )

    cc_library(name = "stream_cuda", ..., target_compatible_with = CUDA_ONLY)

cuda_library targets are skipped by wildcard builds (//...) where CUDA is absent or switched off;
so is whatever depends on one without if_cuda.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:toolkit.bzl", "CUDA_VERSION", "NVCC")

_ENABLED = "//tools/bazel/cuda:enabled"

# sm_80 for every recent data-centre GPU, sm_90a for what only Hopper has (wgmma, setmaxnreg).
DEFAULT_ARCHS = ["80", "90a"]

_NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-lineinfo",
    "-Werror",
    "all-warnings",
    "-Xcompiler=-Wall,-Wextra,-fPIC",
]

# For target_compatible_with of rules other than cuda_library.
CUDA_ONLY = select({
    _ENABLED: [],
    "//conditions:default": ["//tools/bazel/cuda:toolkit"],
})

def if_cuda(values, otherwise = []):
    """Returns `values` where CUDA is enabled and `otherwise` where it is not."""
    return select({
        _ENABLED: values,
        "//conditions:default": otherwise,
    })

BoolFlagInfo = provider(doc = "A command-line switch.", fields = ["value"])

def _bool_flag_impl(ctx):
    return BoolFlagInfo(value = ctx.build_setting_value)

bool_flag = rule(
    implementation = _bool_flag_impl,
    build_setting = config.bool(flag = True),
    doc = "A switch that is set with --//path:name=true.",
)

def _compile(ctx, toolchain, src, compilation):
    """Compiles one .cu file to an object that holds host code and code for every architecture."""
    obj = ctx.actions.declare_file("_objs/{}/{}.o".format(ctx.label.name, src.basename))

    args = ctx.actions.args()
    args.add("-c", src)
    args.add("-o", obj)
    args.add("-ccbin", toolchain.compiler_executable)
    args.add_all(_NVCC_FLAGS)
    for arch in ctx.attr.archs:
        args.add("-gencode=arch=compute_{0},code=sm_{0}".format(arch))
    if ctx.attr.ptxas_verbose or ctx.attr._ptxas_verbose[BoolFlagInfo].value:
        args.add("-Xptxas=-v")
    args.add_all(compilation.defines, before_each = "-D")
    args.add_all(compilation.local_defines, before_each = "-D")
    args.add_all(compilation.includes, before_each = "-I")
    args.add_all(compilation.quote_includes, before_each = "-I")
    args.add_all(compilation.system_includes, before_each = "-isystem")
    args.add_all(ctx.attr.copts)

    ctx.actions.run(
        mnemonic = "CudaCompile",
        progress_message = "Compiling " + src.short_path,
        executable = NVCC,
        arguments = [args],
        inputs = depset(
            [src],
            transitive = [compilation.headers, toolchain.all_files],
        ),
        outputs = [obj],
        # nvcc calls its helpers and the host compiler through PATH. The version is here only so
        # that another toolkit at the same path recompiles everything.
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "CUDA_VERSION_KEY": CUDA_VERSION},
    )
    return obj

def _cuda_library_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps]

    # What dependents see, and what this target's own sources are compiled with.
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([".", ctx.bin_dir.path]),
        defines = depset(ctx.attr.defines),
    )
    compilation = cc_common.merge_cc_infos(
        direct_cc_infos = [CcInfo(compilation_context = own)],
        cc_infos = deps,
    ).compilation_context
    objects = depset([_compile(ctx, toolchain, src, compilation) for src in ctx.files.srcs])
    linking, outputs = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = objects,
            pic_objects = objects,
        ),
        linking_contexts = [dep.linking_context for dep in deps],
        disallow_dynamic_library = True,
    )
    library = outputs.library_to_link
    return [
        DefaultInfo(files = depset([library.pic_static_library or library.static_library])),
        CcInfo(compilation_context = compilation, linking_context = linking),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "archs": attr.string_list(),
        "copts": attr.string_list(),
        "defines": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "ptxas_verbose": attr.bool(),
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_ptxas_verbose": attr.label(default = "//tools/bazel/cuda:ptxas_verbose"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], archs = DEFAULT_ARCHS, **kwargs):
    """A library of .cu files that cc_library, cc_binary and cc_test can depend on.

    Args:
      name: target name.
      srcs: .cu files, one object each, without relocatable device code.
      hdrs: .h and .cuh files; private ones too.
      deps: cc_library or cuda_library targets whose headers the sources include.
      archs: compute capabilities to compile for, such as ["90a"] for Hopper-only kernels.
      **kwargs: copts (nvcc flags), defines, ptxas_verbose (always print ptxas's report), and the
        attributes that every rule has.
    """
    _cuda_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        archs = archs,
        target_compatible_with = CUDA_ONLY,
        deps = deps + ["@cuda//:cudart_static"],
        **kwargs
    )
