#!/bin/sh
# Starts the program of this file's name with the bundle's libraries.
here=$(dirname "$(readlink -f "$0")")
root=$(dirname "$here")
LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$root/libexec/$(basename "$0")" "$@"
