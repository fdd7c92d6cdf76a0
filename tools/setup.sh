#!/usr/bin/env bash
# Installs what is missing on Debian 12 or Ubuntu 24.04, then builds and runs.
#
#   tools/setup.sh run                  prefills a batch on the CPU and verifies it
#   tools/setup.sh test                 builds and tests everything; ends with the counts
#   tools/setup.sh install PACKAGE...   installs these packages too, and runs nothing
#
# Nothing is installed, asked of a server or rebuilt when it is there already. BAZEL holds the
# command to call, such as BAZEL="bazel --output_base=/tmp/out".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  g++ python3
  libbenchmark-dev libblis-serial-dev libcli11-dev libfmt-dev libgmock-dev libgtest-dev libhwy-dev
  libspdlog-dev nlohmann-json3-dev
)
# A Bazel of the user's own is left alone; it brings its own rules.
if ! command -v bazel >/dev/null || dpkg-query -W bazel-bootstrap &>/dev/null; then
  packages+=(bazel-bootstrap bazel-rules-java bazel-rules-proto)
fi

fail() {
  echo "setup: $*" >&2
  exit 1
}

# Prints those of the packages given that are not installed.
missing() {
  comm -23 <(printf '%s\n' "$@" | sort -u) \
    <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null |
      sed -n 's/^installed //p' | sort -u)
}

install() {
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
    fail "this script installs packages with apt only; elsewhere install the likes of: $*"
  local wanted unknown=()
  mapfile -t wanted < <(missing "$@")
  [[ ${#wanted[@]} == 0 ]] && return

  local as_root=()
  if [[ $EUID != 0 ]]; then
    command -v sudo >/dev/null || fail "run this as root: apt-get install ${wanted[*]}"
    as_root=(sudo)
  fi
  echo "setup: installing ${wanted[*]}" >&2
  "${as_root[@]}" apt-get -qq update || echo "setup: package lists are not fresh, trying anyway" >&2
  for package in "${wanted[@]}"; do
    apt-cache show "$package" &>/dev/null || unknown+=("$package")
  done
  [[ ${#unknown[@]} == 0 ]] ||
    fail "apt has no package ${unknown[*]}; on Ubuntu they are in the component 'universe'"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "${wanted[@]}" >/dev/null ||
    fail "apt could not install ${wanted[*]}; its reason is above"
  mapfile -t wanted < <(missing "$@")
  [[ ${#wanted[@]} == 0 ]] || fail "still missing after the installation: ${wanted[*]}"
}

bazel=${BAZEL:-bazel}

case ${1:-} in
  run)
    install "${packages[@]}"
    exec $bazel run //tools:engine_cli -- run --model deepseek-v2-lite \
      --query-lens 64,17,1 --context-lens 10240,0,512 \
      --workspace-tokens 4096 --page-size 64 --backend cpu --verify
    ;;
  test)
    install "${packages[@]}"
    events=$(mktemp)
    trap 'rm -f "$events"' EXIT
    status=0
    $bazel test --keep_going --build_event_json_file="$events" //... || status=$?
    python3 tools/count_tests.py "$events" "$status"
    ;;
  install)
    install "${packages[@]}" "${@:2}"
    ;;
  *)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
