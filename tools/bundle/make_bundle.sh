#!/bin/bash
# Packs programs with the shared libraries they need.
#
#   make_bundle.sh OUT PROGRAM_SH RUN_SH RUN_PY PROGRAM... -- TEST...
#
#   mla_prefill/bin/NAME         program.sh under the program's name: sets the library path
#   mla_prefill/libexec/NAME     the program
#   mla_prefill/tests/NAME       a test program, likewise
#   mla_prefill/lib/             shared libraries that a plain Ubuntu or Debian lacks
#   mla_prefill/run_gpu_tests.sh
set -euo pipefail

out=$PWD/$1
program_sh=$2
run_sh=$3
run_py=$4
shift 4

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/mla_prefill
mkdir -p "$root"/{bin,libexec,tests,lib}
install -m 755 "$run_sh" "$run_py" "$root/"

folder=bin
for program in "$@"; do
  if [[ $program == -- ]]; then
    folder=tests
    continue
  fi
  name=$(basename "$program")
  if [[ $name == *.so ]]; then
    install -m 644 "$program" "$root/lib/"
  else
    strip --strip-debug -o "$root/libexec/$name" "$program"
    install -m 755 "$program_sh" "$root/$folder/$name"
  fi
  # What glibc and the compiler bring is on every machine, in a version that may be newer than ours.
  ldd "$program" | awk '$3 ~ /^\// {print $1, $3}' |
    grep -vE '^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libresolv|ld-linux[^ ]*)\.so' |
    while read -r soname path; do
      [[ -e $root/lib/$soname ]] || install -m 644 "$path" "$root/lib/$soname"
    done
done

# Each program has all kernels in it; a dictionary longer than a program stores them once.
tar -C "$stage" --sort=name --owner=0 --group=0 --mtime='2000-01-01 UTC' -c mla_prefill |
  xz --lzma2=preset=4,dict=64MiB >"$out"
