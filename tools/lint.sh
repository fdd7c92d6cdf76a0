#!/usr/bin/env bash
# Checks the format of all C++ and CUDA sources and runs clang-tidy over the host sources.
#
#   tools/lint.sh               everything that git tracks
#   tools/lint.sh FILE...       those of these files that are C++ or CUDA
#   tools/lint.sh --fix [FILE...]   formats instead, and does not run clang-tidy
#
# The direction of the layers needs no lint: Bazel's visibility refuses a wrong dependency.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! { command -v clang-format && command -v clang-tidy && command -v git; } >/dev/null; then
  tools/setup.sh install clang-format clang-tidy git
fi

fix=
if [[ ${1:-} == --fix ]]; then
  fix=1
  shift
fi

mapfile -t files < <(if [[ $# != 0 ]]; then printf '%s\n' "$@"; else git ls-files; fi |
  grep -E '\.(h|c|cc|cu|cuh)$' || true)
[[ ${#files[@]} != 0 ]] || exit 0

if [[ -n $fix ]]; then
  clang-format -i "${files[@]}"
  exit
fi

status=0
clang-format --dry-run -Werror "${files[@]}" || status=1

# Sources that include CUDA or NCCL headers are by convention in kernels/cuda or named so.
mapfile -t tidy < <(printf '%s\n' "${files[@]}" |
  grep -E '\.cc$' | grep -vE '(^|/)(kernels/cuda/|[^/]*cuda[^/]*\.cc$|[^/]*nccl[^/]*\.cc$)' || true)
if [[ ${#tidy[@]} != 0 ]]; then
  # One file a process: a slow one then holds up nobody else. Its output is kept together, and only
  # shown if there is something to see.
  printf '%s\n' "${tidy[@]}" | xargs -P "$(nproc)" -I{} bash -c '
    out=$(timeout 300 clang-tidy --quiet "$1" -- -std=c++20 -I. -DSPDLOG_COMPILED_LIB \
      -DSPDLOG_FMT_EXTERNAL 2>/dev/null) || { printf "%s\n%s\n" "clang-tidy: $1" "$out"; exit 1; }
  ' _ {} || tidy_status="; clang-tidy's findings above are to be mended, and do not fail this run yet"
fi

[[ $status == 0 ]] &&
  echo "lint: ${#files[@]} files formatted, ${#tidy[@]} checked by clang-tidy${tidy_status:-}"
exit $status
