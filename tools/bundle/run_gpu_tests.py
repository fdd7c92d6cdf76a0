#!/usr/bin/env python3
"""Runs the bundle's test suites with MLA_TEST_BACKEND=cuda.

    run_gpu_tests.sh [--filter GTEST_FILTER] [--suites NAME ...] [--jobs N] [--tool TOOL]

Prints each suite's failures and, as its last line, `N passed, N failed, N skipped`. A suite that
crashes, runs out of time, leaves no report or, under a tool, shows errors counts as one failed
case. Exits with 1 if anything failed or nothing ran. --tool runs each suite under compute-sanitizer
with memcheck, racecheck, initcheck or synccheck.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="*", help="GoogleTest filter (default: all)")
    parser.add_argument("--suites", nargs="*", help="names of suites (default: all)")
    parser.add_argument("--jobs", type=int, default=4, help="suites at a time (default: 4)")
    parser.add_argument("--tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--timeout", type=int, default=600, help="seconds a suite (default: 600)")
    return parser.parse_args()


def run_suite(program, options):
    """Returns (passed, failed, skipped) and what to print."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [str(program), "--gtest_filter=" + options.filter, f"--gtest_output=json:{report}"]
        environment = dict(os.environ, MLA_TEST_BACKEND="cuda")
        if options.tool:
            command = ["compute-sanitizer", "--tool", options.tool, "--target-processes", "all",
                       "--error-exitcode", "99"] + command
        try:
            result = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, timeout=options.timeout,
                                    text=True, errors="replace", check=False)
            status, output = result.returncode, result.stdout
        except subprocess.TimeoutExpired as timeout:
            status, output = "timeout", (timeout.stdout or b"").decode(errors="replace")
        counts = [0, 0, 0]
        if report.exists():
            for suite in json.loads(report.read_text())["testsuites"]:
                for case in suite["testsuite"]:
                    skipped = case["result"] == "SKIPPED" or case["status"] == "NOTRUN"
                    counts[1 if "failures" in case else 2 if skipped else 0] += 1
    if status != 0 and counts[1] == 0:
        counts[1] = 1
    seconds = time.monotonic() - started
    lines = [f"{program.name}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped, "
             f"{seconds:.1f} s"]
    if counts[1]:
        lines.append(f"status {status}\n{output[-6000:]}")
    return counts, "\n".join(lines)


def main():
    options = parse_arguments()
    programs = sorted((ROOT / "tests").iterdir())
    if options.suites:
        programs = [program for program in programs if program.name in options.suites]
    total = [0, 0, 0]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for counts, text in pool.map(lambda program: run_suite(program, options), programs):
            total = [a + b for a, b in zip(total, counts)]
            print(text, flush=True)
    print("{} passed, {} failed, {} skipped".format(*total))
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
