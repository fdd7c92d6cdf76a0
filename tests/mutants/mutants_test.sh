#!/usr/bin/env bash
# Every mutant of tests/support/mutant_backend.h turns the suite of its op red, and the same tests
# are green without it. Red means GoogleTest's exit code 1: tests ran and failed. A crash, or a name
# that the suite doesn't know, is no proof.
set -uo pipefail

log=$TEST_TMPDIR/log
status=0

# expect RC WHAT COMMAND...
expect() {
  local expected=$1 what=$2 found=0
  shift 2
  "$@" >"$log" 2>&1 || found=$?
  if [[ $found == "$expected" ]]; then
    echo "ok: $what"
  else
    echo "FAILED: $what: exit code $found, expected $expected"
    tail -n 20 "$log"
    status=1
  fi
}

# check SUITE TESTS MUTANT...
check() {
  local suite=tests/$1 tests=$2
  shift 2
  expect 0 "$suite without a mutant" "$suite" --gtest_filter="$tests"
  grep -qE '^\[  PASSED  \] [1-9]' "$log" || {
    echo "FAILED: no test of $suite matches $tests"
    status=1
  }
  for mutant in "$@"; do
    expect 1 "$suite with $mutant" env MLA_TEST_MUTANT="$mutant" "$suite" --gtest_filter="$tests"
  done
}

# The first check is of the switch itself: a mutant's own merge is right but for its fault.
unset MLA_TEST_BACKEND MLA_TEST_MUTANT
unset XML_OUTPUT_FILE  # the report of this test, not of the suites it runs
expect 0 "merge_test with no_fault" env MLA_TEST_MUTANT=no_fault tests/kernels/merge_test
check kernels/mask_test 'MaskTest.ExactlyRows33To163' mask_off
check kernels/merge_test 'MergeTest.*' base2_lse offset32 multiply_weight0
check kernels/attention_test 'AttentionTest.*' top_left_causal
check engine/agreement_test 'AgreementTest.AnyWorkspaceServesAnyStepAlike' \
  mask_off base2_lse multiply_weight0
exit $status
