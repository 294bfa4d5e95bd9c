#!/usr/bin/env python3
"""Takes fixes out of a copy of the tree, case by case, and reports the first random program that
fails without each.

Usage: .venv/bin/python3 -B tools/check_programs_find.py [--case=H7]... [--seeds=500] [--list]

tests/hooks/programs/taken_out.md names the cases, the code of each and what takes its place. All of it is built
once, under ~/.cache/pinion_taken_out; PINION_TAKEN_OUT switches a case on. Prints a row for each
case and exits 1 if one is not found. --list only looks whether the code is there, and prints
"N passed, N failed".
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).absolute().parent.parent
_DOCUMENT = "tests/hooks/programs/taken_out.md"
_SWITCH = (
    "[] { static const char* const out = ::getenv(\"PINION_TAKEN_OUT\"); "
    "static const bool is_out = out != nullptr && ::strcmp(out, \"%s\") == 0; return is_out; }()"
)
_INCLUDES = "#include <stdlib.h>\n#include <string.h>\n#line 1\n"


def read_rows(text):
    """[(case, path, code, what takes its place)], from the table with files."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 6 and re.fullmatch(r"`[\w/]+\.(cc|h)`", cells[2]):
            rows.append((cells[1], *(cell.strip("`") for cell in cells[2:5])))
    return rows


def missing(rows):
    return [f"{_DOCUMENT}: {case}: not once in {path}: {code}"
            for case, path, code, _ in rows if (_ROOT / path).read_text().count(code) != 1]


def taken_out(path, rows):
    text = (_ROOT / path).read_text()
    for case, _, code, instead in rows:
        switch = _SWITCH % case
        if code.endswith(";"):
            text = text.replace(code, f"if ({switch}) {{ {instead} }} else {{ {code} }}")
        else:
            text = text.replace(code, f"({switch} ? ({instead}) : ({code}))")
    return _INCLUDES + text


def copy_tree(scratch, rows):
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    changed = {path: [row for row in rows if row[1] == path] for _, path, _, _ in rows}
    for path in filter(None, listed.split("\0")):
        source, target = _ROOT / path, scratch / path
        data = taken_out(path, changed[path]).encode() if path in changed else source.read_bytes()
        if target.is_file() and target.read_bytes() == data:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(source.stat().st_mode & 0o777)
    if not (scratch / ".venv").is_symlink():
        (scratch / ".venv").symlink_to((_ROOT / ".venv").resolve())
    if (_ROOT / "user.bazelrc").exists():
        (scratch / "user.bazelrc").write_text((_ROOT / "user.bazelrc").read_text())


def find(scratch, case, seeds):
    """(first seed that fails or none, what it says)."""
    program = scratch / "bazel-bin/tests/hooks/programs/run_programs"
    ran = subprocess.run(
        [program, f"--seeds={seeds}", "--first=1", "--failures=1", "--minimise=false"],
        env={**os.environ, "PINION_TAKEN_OUT": case}, capture_output=True, text=True, errors="replace",
    )
    if ran.returncode == 0:
        return None, f"not found by {seeds} programs"
    failed = re.findall(r"^(?:seed \d+\r)*seed (\d+): (?!passes)(.*)$", ran.stdout.replace("\n\r", "\n"), re.MULTILINE)
    if failed:
        return int(failed[-1][0]), failed[-1][1]
    return int(re.findall(r"seed (\d+)", ran.stdout)[-1]), f"the process dies ({ran.returncode})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", help="of the table; all without")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--scratch", default="~/.cache/pinion_taken_out", help="where the copy is built")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    rows = read_rows((_ROOT / _DOCUMENT).read_text())
    not_there = missing(rows)
    for complaint in not_there:
        print(complaint, file=sys.stderr)
    if options.list or not rows or not_there:
        print(f"{len(rows) - len(not_there)} passed, {len(not_there)} failed")
        return 0 if rows and not not_there else 1
    scratch = pathlib.Path(options.scratch).expanduser()
    copy_tree(scratch, rows)
    subprocess.run(["./bazelw", "build", "--config=opt", "--noshow_progress", "//tests/hooks/programs:run_programs"],
                   cwd=scratch, check=True, env={**os.environ, "PINION_SKIP_INSTALL": "1"})
    all_found = True
    for case in options.case or dict.fromkeys(row[0] for row in rows):
        seed, what = find(scratch, case, options.seeds)
        all_found = all_found and seed is not None
        print(f"| {case} | {seed if seed is not None else '-'} | {what} |", flush=True)
    return 0 if all_found else 1


if __name__ == "__main__":
    sys.exit(main())
