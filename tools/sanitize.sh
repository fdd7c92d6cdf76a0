#!/usr/bin/env bash
# Runs the tests that carry the tag "sanitizer" under each sanitizer, or under those named.
#
#   tools/sanitize.sh [asan] [ubsan] [tsan]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# != 0 ]] || set -- asan ubsan tsan
status=0
for sanitizer in "$@"; do
  echo "== $sanitizer"
  # Sanitizers slow a test down by ten times and more, its time limit with it.
  ${BAZEL:-bazel} test --keep_going --test_timeout=900 --config="$sanitizer" //... || status=1
done
exit $status
