"""Local stand-ins for the repositories that Debian's Bazel 4.2.3 would download."""

def local_bazel_repositories():
    """Declares rules_cc, rules_java, rules_proto and remote_coverage_tools as local folders.

    Only Debian's build (whose version reads "no_version" or is empty) and the 4.x line need them. A
    newer Bazel, run with --enable_workspace, brings its own rules and must not see ours.
    """
    if native.bazel_version not in ["", "no_version"] and native.bazel_version[:2] != "4.":
        return

    # Debian's bazel-rules-cc does not load under 4.2.3, so a shim forwards to the native rules.
    native.local_repository(name = "rules_cc", path = "tools/bazel/rules_cc")

    # Packages bazel-rules-java and bazel-rules-proto.
    native.local_repository(name = "rules_java", path = "/usr/share/bazel/rules/java")
    native.local_repository(name = "rules_proto", path = "/usr/share/bazel/rules/proto")

    # Every test depends on the coverage reporter; nothing here collects coverage.
    native.local_repository(
        name = "remote_coverage_tools",
        path = "tools/bazel/remote_coverage_tools",
    )
