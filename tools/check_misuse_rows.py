#!/usr/bin/env python3
"""Checks that tests/misuse.md has a row for every public function with an argument, and that what its
rows name exists.

Usage: python3 -B tools/check_misuse_rows.py [DIRECTORY]
Prints what is missing, then "N passed, N failed". Exits 1 if anything is missing or if no function
was found. DIRECTORY is this repository by default.

Public headers are those that README.md and docs/users name, and the headers that these include.
Exception: headers in a table that begins "| internal header". Public functions are free functions and
public members of classes. Exceptions: operators, copies, moves and destructors; functions in a
namespace named internal; overrides, because the function that they override has a row.

Rows are those of tables that begin "| function". The first cell has names: `Function`,
`Class::Function`, or `Class` for its constructors. `Second` after `Class::First` may be a function of
the same class. Names have no namespace, and no Impl at the end of a class.
"""

import pathlib
import re
import sys

_PAGE = "tests/misuse.md"
_FOLDERS = ("allocator", "device", "engine", "hooks", "shared")
_HEADER = re.compile(r"(?:pinion/)?([\w/]+\.h)\b")
_INCLUDE = re.compile(r'^#include "pinion/([^"]+)"', re.MULTILINE)
# Comments, texts, preprocessor lines, attributes and macros.
_NOISE = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*|\[\[[^\]]*\]\]|->'
    r"|\b(?:ABSL_[A-Z_]+|alignas)\b(?:\([^()]*\))?",
    re.MULTILINE,
)
_SCOPE = re.compile(r"(?:template )?(?:inline )?(namespace|class|struct|union|enum|extern)\b(?: class)? ?([\w:]*)[^(]*")
_FUNCTION = re.compile(r"(?!friend|using|typedef|static_assert)([^=(]*?)(\w+) ?(\((?!\*).*)")
_TEMPLATE_ARGUMENTS = re.compile(r"<(?:[^<>]|<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)*>")


def statements_of(text):
    """Yields the statements outside of function bodies, without the arguments of templates. Each follows
    the scopes around it: [(class or "", whether it is public)]."""
    scopes, statement, brackets, skipped = [], "", 0, 0
    for part in re.findall(r"::|[{}();:]|[^{}();:]+", _NOISE.sub(" ", text)):
        if skipped:  # in a function's body, or in an initialiser
            skipped += (part == "{") - (part == "}")
            continue
        brackets += (part == "(") - (part == ")")
        line = " ".join(_TEMPLATE_ARGUMENTS.sub("", statement).split())
        if part == ":" and line in ("public", "protected", "private"):
            scopes[-1] = (scopes[-1][0], line == "public")
            statement = ""
        elif brackets or part not in (";", "{", "}"):
            statement += part
        elif part == "{" and (scope := _SCOPE.fullmatch(line)):
            kind, name = scope.groups()
            is_class = kind in ("class", "struct")
            is_internal = kind == "namespace" and re.search("internal$|^$", name)
            is_public = kind != "class" and not is_internal and "template <>" not in statement
            scopes.append((name.removesuffix("Impl") if is_class else "", is_public))
            statement = ""
        elif part == "{" and "(" not in line:
            skipped = 1  # the field's statement goes on behind its initialiser
        else:
            yield scopes, line
            statement, skipped = "", int(part == "{")
            if part == "}":
                scopes.pop()


def functions_of(text):
    """Returns {name: whether it needs a row} of a header's classes and functions."""
    functions = {}
    for scopes, line in statements_of(text):
        classes = [name for name, _ in scopes if name]
        functions.setdefault("::".join(classes), False)  # a row may name a class without constructors
        found = _FUNCTION.fullmatch(line)
        if not found or re.search(r"~|\boperator\b|= delete\b", line):
            continue
        before, name, rest = found.groups()
        needs_row = not re.match(r"\((void)?\)|.*\boverride\b", rest) and all(is_public for _, is_public in scopes)
        if name.removesuffix("Impl") in classes[-1:]:
            classes.pop()
            needs_row = needs_row and not re.match(rf"\((const )?{name} ?&&?( \w+)?\)", rest)
        elif not before or re.match("k[A-Z]", name):
            continue  # a macro or a constant
        name = "::".join([*classes, name.removesuffix("Impl")])
        functions[name] = functions.get(name, False) or needs_row
    return functions


def rows_of(page, head):
    """Yields (line number, names in backticks) of the rows of the tables that begin `head`."""
    is_table = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith(head):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table:
            yield number, re.findall(r"`([^`]+)`", line.split(" | ")[0])


def complaints_and_count(directory):
    paths = [path for folder in _FOLDERS for path in (directory / folder).rglob("*.h")]
    headers = {str(path.relative_to(directory)): path.read_text() for path in paths}
    functions = {header: functions_of(text) for header, text in headers.items()}
    known = set().union(*functions.values())
    guides = [directory / "README.md", *(directory / "docs" / "users").glob("*.md")]
    names = tuple("/" + name for name in _HEADER.findall("".join(path.read_text() for path in guides)))
    named = {header for header in headers if ("/" + header).endswith(names)}
    included = set().union(*(_INCLUDE.findall(headers[header]) for header in named)) & set(headers)
    page = (directory / _PAGE).read_text()
    complaints, in_rows, passed = [], set(), 0
    for number, names in rows_of(page, "| internal header"):
        complaints += [f"{_PAGE}:{number}: no guide's header includes {name}" for name in set(names) - included]
        included -= set(names)
    for number, names in rows_of(page, "| function"):
        scope = ""
        for name in names:
            name = re.sub(r"\b[a-z]\w*::", "", name)
            name = scope + name if scope + name in known else name
            scope = name.rpartition("::")[0] + "::" if "::" in name else ""
            in_rows.add(name)
            if name not in known:
                complaints.append(f"{_PAGE}:{number}: no header has `{name}`")
    for header in sorted(named | included):
        missing = [name for name, needs_row in functions[header].items() if needs_row and name not in in_rows]
        passed += sum(functions[header].values()) - len(missing)
        complaints += [f"{header}: {name} has no row in {_PAGE}" for name in missing]
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
