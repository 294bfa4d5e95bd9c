#!/usr/bin/env python3
"""Counts the test cases in the test.xml files that bazel wrote under a directory.

Usage: count_tests.py DIRECTORY [NEWER_THAN_FILE]
Prints "PASSED FAILED SKIPPED". A test binary that died before it could report counts as one failure.
"""

import os
import sys
import xml.etree.ElementTree as ElementTree


def count_file(path):
    cases = ElementTree.parse(path).getroot().iter("testcase")
    passed = failed = skipped = 0
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            skipped += 1
        elif case.get("status") != "notrun":
            passed += 1
    return passed, failed, skipped


def main():
    root = os.path.realpath(sys.argv[1])
    newer_than = os.path.getmtime(sys.argv[2]) if len(sys.argv) > 2 else 0
    totals = [0, 0, 0]
    for directory, _, files in os.walk(root):
        if "test.xml" not in files:
            continue
        path = os.path.join(directory, "test.xml")
        if os.path.getmtime(path) < newer_than:
            continue
        for i, count in enumerate(count_file(path)):
            totals[i] += count
    print(*totals)


if __name__ == "__main__":
    main()
