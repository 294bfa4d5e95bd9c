#!/usr/bin/env python3
"""Checks that the tests which documents name are there, and that each row of a table whose last
column is headed "tests" names one.

Usage: python3 -B tools/check_named_tests.py [DIRECTORY]
Names what is missing, prints "N passed, N failed", and exits 1 if anything is or if nothing was
checked. DIRECTORY, this repository if none is given, has docs/ and tests/.

A name is `Suite.Test`, or `Suite.Begin*` for all that begin so, in backticks. With a file before
it, `rules_test`: `Suite.Test`, the test is in rules_test.cc. A file holds for the names that follow
it in its table cell or item.
"""

import pathlib
import re
import sys

# In which all such names are tests; docs/waits.md has a test of its own.
DOCUMENTS = [
    "docs/checkpoint.md",
    "docs/emulated.md",
    "docs/limits.md",
    "docs/misuse.md",
    "docs/peers.md",
    "docs/trl_parity.md",
    "docs/weights.md",
]

_TEST = re.compile(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
_NAMED = re.compile(r"`(?:(?P<file>\w+_test)|(?P<suite>[A-Z]\w+)\.(?P<name>[A-Z]\w*\*?|\*))`")
_RULE = re.compile(r"\|[-:| ]+\|?\s*")  # |---|---|, below a table's head


def tests_by_file(directory):
    """{"rules_test": {"Suite.Test", ...}, ...}, of all files of that name."""
    tests = {}
    for path in (directory / "tests").rglob("*.cc"):
        tests.setdefault(path.stem, set()).update(map(".".join, _TEST.findall(path.read_text())))
    return tests


def rows_of(text):
    """The cells of each row of such tables. All that begins with | is one, but for heads."""
    last_column = ""
    lines = text.splitlines()
    for line, below in zip(lines, lines[1:] + [""]):
        if not line.startswith("|") or _RULE.fullmatch(line):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if _RULE.fullmatch(below):
            last_column = cells[-1]
        elif last_column == "tests":
            yield cells


def complaints_and_count(directory):
    tests = tests_by_file(directory)
    everywhere = set().union(*tests.values())
    complaints, passed = [], 0
    for document in DOCUMENTS:
        for number, line in enumerate((directory / document).read_text().splitlines(), 1):
            file = None
            for named in re.finditer(_NAMED.pattern + r"| \| ", line):
                if named.group() == " | ":
                    file = None  # the next cell
                    continue
                if named["file"]:
                    file = named["file"]
                    found = file in tests
                else:
                    where = everywhere if file is None else tests.get(file, set())
                    name = f"{named['suite']}.{named['name']}"
                    found = any(t.startswith(name[:-1]) for t in where) if name.endswith("*") else name in where
                if found:
                    passed += 1
                else:
                    inside = f" in {file}.cc" if file and not named["file"] else ""
                    complaints.append(f"{document}:{number}: {named.group()} is no test{inside}")
        for cells in rows_of((directory / document).read_text()):
            if any(named["name"] for named in _NAMED.finditer(cells[-1])):
                passed += 1
            else:
                complaints.append(f"{document}: a row without a test: {cells[0]}")
    return complaints, passed


def main(arguments):
    directory = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).absolute().parent.parent
    complaints, passed = complaints_and_count(directory)
    for complaint in complaints:
        print(complaint)
    print(f"{passed} passed, {len(complaints)} failed")
    # Nothing to check is not that nothing is wrong.
    return 1 if complaints or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
