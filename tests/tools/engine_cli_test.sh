#!/usr/bin/env bash
# The program itself: exit codes, and what goes to stdout and what to stderr.
set -uo pipefail

cli=tools/engine_cli
status=0

# expect RC OUT ERR ARGUMENTS...: OUT and ERR are patterns that the first lines must match; "" stands
# for no output at all.
expect() {
  local expected=$1 out=$2 err=$3 found=0
  shift 3
  "$cli" "$@" >"$TEST_TMPDIR/out" 2>"$TEST_TMPDIR/err" || found=$?
  local first_out first_err
  first_out=$(head -n 1 "$TEST_TMPDIR/out")
  first_err=$(head -n 1 "$TEST_TMPDIR/err")
  if [[ $found != "$expected" ]]; then
    echo "FAILED: engine_cli $*: exit code $found, expected $expected"
    status=1
  fi
  if ! [[ $first_out =~ ^$out$ && $first_err =~ ^$err$ ]]; then
    printf 'FAILED: engine_cli %s\nstdout: %s\nstderr: %s\n' "$*" "$first_out" "$first_err"
    status=1
  fi
}

small=(--backend cpu --heads 3 --nope 24 --rope 8 --vdim 16 --lora 40)
batch=(--query-lens 64,17,1 --context-lens 1024,0,51 --workspace-tokens 256 --page-size 16)

for schedule in packed uniform fixed; do
  expect 0 '\{' '' run "${batch[@]}" --verify --json - --schedule $schedule \
    --model deepseek-v2-lite --backend cpu
  grep -q '"status": "ok"' "$TEST_TMPDIR/out" || { echo "FAILED: $schedule"; status=1; }
done
expect 0 'custom on cpu .*' '' run "${small[@]}" --requests 4 --prompt-lens 30:90 \
  --max-num-batched-tokens 64 --verify
expect 0 '3 requests, .*' '' plan "${batch[@]}" --backend cpu
expect 0 'Model .*' '' info --backend cpu
expect 0 'Chunked prefill.*' '' --help
expect 2 '' 'engine_cli: .*no batch.*' run
expect 2 '' 'engine_cli: .*subcommand.*'
expect 2 '' "engine_cli: .*/nonexistent/x.*" run "${small[@]}" "${batch[@]}" --json /nonexistent/x

# A full disk is an error, not a silent loss.
"$cli" plan "${batch[@]}" --backend cpu >/dev/full 2>"$TEST_TMPDIR/err"
[[ $? == 2 ]] || { echo "FAILED: stdout that can't be written"; status=1; }

"$cli" --help >/dev/full 2>"$TEST_TMPDIR/err"
[[ $? == 2 ]] || { echo "FAILED: help that can't be written"; status=1; }

# Where threads can't be had, the command says so and ends: 64 stacks of 64 MiB pass the limit.
for threads in "--threads 64" "--cp 64 --threads 1"; do
  (ulimit -s 65536 -v 2000000 && "$cli" run "${small[@]}" --query-lens 3 --context-lens 9 \
    --workspace-tokens 64 $threads) 2>"$TEST_TMPDIR/err"
  [[ $? == 3 ]] && grep -q "^engine_cli: can't start" "$TEST_TMPDIR/err" ||
    { echo "FAILED: $threads without threads to start"; cat "$TEST_TMPDIR/err"; status=1; }
done

# An error keeps its exit code where nobody can hear of it.
"$cli" run --query-lens x 2>&-
[[ $? == 2 ]] || { echo "FAILED: stderr that is closed"; status=1; }

exit $status
