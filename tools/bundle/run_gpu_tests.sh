#!/bin/sh
# Runs the bundle's test suites on the GPU. See run_gpu_tests.py --help.
exec python3 "$(dirname "$(readlink -f "$0")")/run_gpu_tests.py" "$@"
