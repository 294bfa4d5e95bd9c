#!/usr/bin/env python3
"""Checks that every test named in a Markdown page exists, and that each row of a table whose last
column is headed "tests" names one.

Usage: python3 -B tools/check_named_tests.py [DIRECTORY]
Prints what is missing, then "N passed, N failed". Exits 1 if anything is missing or if no name was
found. DIRECTORY is this repository by default. The pages are README.md, CONTRIBUTING.md, and all
pages below docs/ and tests/.

A name is `Suite.Test` in backticks, or `Suite.Begin*` for all tests that begin so. A file before the
name, as in `rules_test`: `Suite.Test`, says that the test is in rules_test.cc. The file holds for the
names that follow it in the same table cell or item. A file without a colon must exist as well.
"""

import pathlib
import re
import sys

_TEST = re.compile(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
_NAMED = re.compile(r"`(?P<file>\w+_test)`(?P<scopes>(?=:))?|`(?P<suite>[A-Z]\w+)\.(?P<name>[A-Z]\w*\*?|\*)`")
_RULE = re.compile(r"\|[-:| ]+\|?\s*")  # |---|---|, below a table's head


def tests_by_file(directory):
    """Returns {"rules_test": {"Suite.Test", ...}, ...}. Files of one name are merged."""
    tests = {}
    for path in (directory / "tests").rglob("*.[ch]*"):  # a suite of several programs is in a header
        tests.setdefault(path.stem, set()).update(map(".".join, _TEST.findall(path.read_text())))
    return tests


def pages_of(directory):
    pages = [path for folder in ("docs", "tests") for path in (directory / folder).rglob("*.md")]
    return sorted(pages + list(directory.glob("*.md")))


def rows_of(text):
    """Yields the cells of each row of a table whose last column is headed "tests"."""
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
    for page in pages_of(directory):
        document, text = page.relative_to(directory), page.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            file = None
            for named in re.finditer(_NAMED.pattern + r"| \| ", line):
                if named.group() == " | ":
                    file = None  # the next cell
                    continue
                if named["file"]:
                    found = named["file"] in tests
                    if named["scopes"] is not None:
                        file = named["file"]
                else:
                    where = everywhere if file is None else tests.get(file, set())
                    name = f"{named['suite']}.{named['name']}"
                    found = any(t.startswith(name[:-1]) for t in where) if name.endswith("*") else name in where
                if found:
                    passed += 1
                else:
                    inside = f" in {file}.cc" if file and not named["file"] else ""
                    complaints.append(f"{document}:{number}: {named.group()} is no test{inside}")
        for cells in rows_of(text):
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
    # A run that checked nothing has proved nothing.
    return 1 if complaints or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
