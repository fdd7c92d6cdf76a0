#!/usr/bin/env python3
"""Counts test cases after `bazel test --build_event_json_file=EVENTS`.

    count_tests.py EVENTS STATUS

EVENTS says which targets the build tried and where each one's result lies, so results of earlier
builds are not counted; STATUS is Bazel's exit status. Prints every failure, then as its last line
`N passed, N failed, N skipped`. Cases come from the XML that GoogleTest wrote. A target that did not
build, crashed, timed out or left no XML counts as one failed case; a target that this machine cannot
run (no CUDA toolkit) as one skipped case. Exits with 1 if anything failed or nothing ran.
"""

import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def count_xml(path):
    """Returns the (passed, failed, skipped) cases of one XML report, and the failed ones' names."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append("{}.{}".format(case.get("classname", ""), case.get("name")).lstrip("."))
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def read_events(path):
    """Returns what became of the targets: {label: set of outcomes}, {(label, run, shard): result}."""
    outcomes, results = {}, {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            kind, identity = next(iter(event["id"].items()))
            label = identity.get("label") if isinstance(identity, dict) else None
            if kind == "testResult" and "testResult" in event:
                # A later attempt of the same run replaces the earlier one.
                key = (label, identity.get("run", 0), identity.get("shard", 0))
                results[key] = event["testResult"]
            elif kind == "testSummary" and "testSummary" in event:
                outcomes.setdefault(label, set()).add(event["testSummary"]["overallStatus"])
            elif "aborted" in event and label:
                outcomes.setdefault(label, set()).add(event["aborted"].get("reason", "ABORTED"))
            elif kind == "targetCompleted" and not event.get("completed", {}).get("success"):
                outcomes.setdefault(label, set()).add("FAILED_TO_BUILD")
    return outcomes, results


def main():
    events, status = sys.argv[1], int(sys.argv[2])
    outcomes, results = read_events(events)
    passed = skipped = 0
    failures = []

    for (label, _, _), result in sorted(results.items()):
        reports = [f["uri"] for f in result.get("testActionOutput", []) if f["name"] == "test.xml"]
        failed = []
        try:
            if reports:
                path = urllib.parse.unquote(urllib.parse.urlparse(reports[0]).path)
                ok, failed, skip = count_xml(path)
                passed += ok
                skipped += skip
        except (OSError, ElementTree.ParseError) as error:
            failed = ["unreadable result: {}".format(error)]
        if not reports and not failed:
            failed = ["no result"]
        if result["status"] not in ("PASSED", "FLAKY") and not failed:
            failed = [result["status"]]
        failures += ["{} {}".format(label, name) for name in failed]

    tested = {label for label, _, _ in results}
    for label, outcome in sorted(outcomes.items()):
        if label in tested or outcome == {"PASSED"}:
            continue
        if outcome == {"SKIPPED"}:
            skipped += 1
        else:
            failures.append("{} {}".format(label, " ".join(sorted(outcome))))

    if status != 0 and not failures:
        failures.append("bazel exited with {}".format(status))
    for failure in failures:
        print("FAILED", failure)
    print("{} passed, {} failed, {} skipped".format(passed, len(failures), skipped))
    return 1 if failures or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
