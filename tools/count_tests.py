#!/usr/bin/env python3
"""Counts the test cases in the test.xml files that bazel wrote under a directory.

Usage: count_tests.py DIRECTORY [NEWER_THAN_FILE]
Prints "PASSED FAILED SKIPPED", then each failed test's folder, name and first lines of the message.
A test binary that died without a report counts as one failure.
"""

import os
import sys
import xml.etree.ElementTree as ElementTree

MESSAGE_LINES = 25


def count_file(path, folder):
    cases = ElementTree.parse(path).getroot().iter("testcase")
    passed = skipped = 0
    failures = []
    for case in cases:
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            message = (failure.get("message") or failure.text or "").splitlines()
            name = f"{folder}: {case.get('classname')}.{case.get('name')}"
            failures.append("\n  ".join([f"FAILED: {name}", *message[:MESSAGE_LINES]]))
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            skipped += 1
        elif case.get("status") != "notrun":
            passed += 1
    return passed, failures, skipped


def main(arguments):
    root = os.path.realpath(arguments[0])
    newer_than = os.path.getmtime(arguments[1]) if len(arguments) > 1 else 0
    passed = skipped = 0
    failures = []
    for directory, _, files in os.walk(root):
        if "test.xml" not in files:
            continue
        path = os.path.join(directory, "test.xml")
        if os.path.getmtime(path) < newer_than:
            continue
        more_passed, more_failures, more_skipped = count_file(path, os.path.relpath(directory, root))
        passed += more_passed
        skipped += more_skipped
        failures += more_failures
    print(passed, len(failures), skipped)
    print(*failures, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
