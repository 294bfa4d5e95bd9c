#!/usr/bin/env python3
"""Checks rules of the sources, and reports what is large.

Rules:
  * No class of the library is implemented in more than one .cc.
  * No scope ends where it begins, here and in all that uses the library: a class whose name ends in
    Scope, Region or Guard is [[nodiscard]], which clang reads, and so are its constructors, which GCC
    reads. A class that implements an interface of LibTorch's (...Interface) is no scope.
  * No test depends on how busy the machine is: *_test.cc calls neither alarm() nor a clock, starts
    programs by RunProgram or RunVisibly, and has a model (TEST(...Model, ...)) only in *_model_test.cc,
    which is optimised and has minutes.
  * BUILD files have no cc_test: the macros of tools/pinion.bzl give tests a host with ample RAM.

Report, for reviewers:
  * files with more than 350 lines,
  * classes with more than a dozen private methods,
  * locks that guard more than six fields.

Usage: .venv/bin/python3 -B tools/check_structure.py [DIRECTORY]
Prints "report: ..." for what is large, and names what breaks a rule. Prints "N passed, N failed", and
exits 1 if a rule is broken or if nothing was checked. DIRECTORY, this repository if none is given, has
the folders of the library's layers.

A class that implements an interface in its private part has these methods, too. Constructors and
destructors are none. A nested class may have a .cc of its own.

A field that another object's lock guards (state_.mu) counts for that lock; what kRecordsLock guards,
which stands for the lock of an OffloadState and is nobody's field, counts class by class. A plain
struct of the same file, with neither methods nor private fields, counts as many as it has, since
nothing says what holds between them. Anything else is one field, with a contract of its own.
"""

import collections
import pathlib
import re
import sys

_TOOLS = pathlib.Path(__file__).absolute().parent
sys.path.insert(0, str(_TOOLS / "mutation"))
import cpp_source  # which parses C++ with Pinion's macros

LAYERS = ["allocator", "device", "engine", "hooks"]
USERS = ["programs", "bench", "examples", "shared", "tests"]

MOST_FILES_OF_A_CLASS = 1
# Above these, the report names it.
MOST_LINES = 350
MOST_PRIVATE_METHODS = 12
MOST_GUARDED_FIELDS = 6

_SCOPE = re.compile(r"(Scope|Region|Guard)$")
_OF_A_BUSY_MACHINE = [
    (rb"\balarm\(", "alarm() ends a child that is only slow: leave a hang to Bazel's limit"),
    (rb"(\babsl::Now|_clock::now)\(", "a clock: assert what happened, and leave a hang to Bazel's limit"),
    (rb"\bstd::system\(", "a program that finds this machine's RAM: start it by RunProgram or RunVisibly"),
]
_MODEL = (rb"^TEST\w*\(\w+Model,", "a model: move it to *_model_test.cc")
_CC_TEST = re.compile(r"^[^#\n]*\bcc_test\(", re.MULTILINE)
_CLASSES = ("class_specifier", "struct_specifier")
_GUARDED_BY = re.compile(rb"^(?!\s*//).*\bABSL_(?:PT_)?GUARDED_BY\(([^()]*)\)", re.MULTILINE)


class Checks:
    def __init__(self):
        self.passed = 0
        self.complaints = []
        self.report = []
        self.locks = collections.Counter()  # fields by (where the lock's class is, its name, the lock)
        self.classes = {}  # where they are, by their own names
        self.implementations = collections.defaultdict(set)  # .cc files by what they define members of

    def at_most(self, limit, number, where, text):
        """`text` says what there are `number` of."""
        if number <= limit:
            self.passed += 1
        else:
            self.complaints.append(f"{where}: {number} {text}, {limit} at most")

    def report_above(self, limit, number, where, text):
        """`text` says what there are `number` of."""
        if number > limit:
            self.report.append(f"{where}: {number} {text}")

    def is_true(self, condition, where, text):
        if condition:
            self.passed += 1
        else:
            self.complaints.append(f"{where}: {text}")


def _find(node, types):
    """The outermost nodes of these types below `node`."""
    for child in node.children:
        if child.type in types:
            yield child
        else:
            yield from _find(child, types)


def _classes(node, outer=""):
    """(name, body) of every class that is defined below `node`, nested ones after their outer one."""
    for found in _find(node, _CLASSES):
        name, body = found.child_by_field_name("name"), found.child_by_field_name("body")
        if body is None:
            continue
        full_name = outer + (name.text.decode() if name else "(unnamed)")
        yield full_name, body
        yield from _classes(body, full_name + "::")


def _method_name(member):
    """Of the method that a member of a class declares; None if it declares something else."""
    if member.type == "template_declaration":
        return next((name for child in member.children if (name := _method_name(child))), None)
    declarator = member.child_by_field_name("declarator")
    while declarator is not None and declarator.type in ("pointer_declarator", "reference_declarator"):
        declarator = declarator.child_by_field_name("declarator") or declarator.children[-1]
    if declarator is None or declarator.type != "function_declarator":
        return None
    name = declarator.child_by_field_name("declarator")
    # Otherwise a field that points to a function.
    return name.text.decode() if name.type != "parenthesized_declarator" else None


def _private_methods(class_name, is_struct, body):
    private = not is_struct
    simple_name = class_name.rpartition("::")[2]
    for member in body.children:
        if member.type == "access_specifier":
            private = member.text == b"private"
        elif private and (name := _method_name(member)) and name not in (simple_name, "~" + simple_name):
            yield name


def _constructors(class_name, body):
    """The names in the declarations of those that are not deleted."""
    for member in body.children:
        if _method_name(member) != class_name.rpartition("::")[2] or b"= delete" in member.text:
            continue
        declared = member.children[-1] if member.type == "template_declaration" else member
        yield declared.child_by_field_name("declarator").child_by_field_name("declarator")


def _check_scopes(name, source, root, checks):
    def check(node, class_name, text):
        # The parser does not see attributes, but its offsets are the file's.
        before = source[max(0, node.start_byte - 40) : node.start_byte]
        where = f"{name}:{node.start_point[0] + 1}: {class_name}"
        checks.is_true(re.search(rb"\[\[nodiscard\]\] (explicit )?$", before), where, text)

    for class_name, body in _classes(root):
        owner = body.parent
        bases = next((part.text for part in owner.children if part.type == "base_class_clause"), b"")
        is_class = owner.type == "class_specifier" and not bases.endswith(b"Interface")
        if not is_class or not _SCOPE.search(class_name):
            continue
        check(owner.child_by_field_name("name"), class_name, "a scope that is not [[nodiscard]]")
        for constructor in _constructors(class_name, body):
            check(constructor, class_name, "a scope's constructor that is not [[nodiscard]]")


def _check_test(name, source, checks):
    """That it does not fail on a busy machine."""
    rules = _OF_A_BUSY_MACHINE + ([] if name.endswith("_model_test.cc") else [_MODEL])
    for pattern, text in rules:
        found = re.search(pattern, source, re.MULTILINE)
        line = source.count(b"\n", 0, found.start()) + 1 if found else 0
        checks.is_true(not found, f"{name}:{line}", text)


def _type_of(field, body):
    """The name of the class of that field; None if `body` has no such field."""
    for member in body.children:
        if member.type == "field_declaration" and re.search(rb"\b%s\b" % field.encode(), member.text):
            return re.sub(r".*::", "", member.child_by_field_name("type").text.decode())
    return None


def _implemented(node):
    """The full name before the last "::" of everything that is defined below `node` under such a name:
    of a class, where it is a member, else of a namespace."""
    for definition in _find(node, ("function_definition", "declaration")):
        declarator = definition.child_by_field_name("declarator")
        while declarator is not None and declarator.type != "qualified_identifier":
            inner = declarator.child_by_field_name("declarator")
            is_reference = inner is None and declarator.type == "reference_declarator"
            declarator = declarator.named_children[-1] if is_reference else inner
        scopes = []
        while declarator is not None and declarator.type == "qualified_identifier":
            scope = declarator.child_by_field_name("scope")
            scopes += [scope.text.decode()] if scope else []
            declarator = declarator.child_by_field_name("name")
        # A function may also return a pointer to a member: int Class::*Function().
        if scopes and declarator.type not in ("pointer_type_declarator", "pointer_declarator"):
            yield "::".join(scopes)


def _is_field(member):
    """Of a class's members: what an object has, and no nested class, method or static field."""
    is_static = any(part.text == b"static" for part in member.children)
    is_declared = member.type == "field_declaration" and member.child_by_field_name("declarator")
    return bool(is_declared) and not is_static and not _method_name(member)


def _size_of(field, classes):
    """How many fields that one is: those of a plain struct of the same file."""
    name = field.child_by_field_name("type").text.decode().rpartition("::")[2]
    body = next((body for full_name, body in classes if full_name.rpartition("::")[2] == name), None)
    is_value = field.child_by_field_name("declarator").type == "field_identifier"
    if body is None or not is_value or body.parent.type != "struct_specifier":
        return 1
    others = [member for member in body.named_children if member.type != "comment" and not _is_field(member)]
    if any(other.type != "field_declaration" or _method_name(other) for other in others):
        return 1
    return sum(_size_of(member, classes) for member in body.named_children if _is_field(member))


def _guarded_fields(source, classes):
    """(the innermost class around it, None where there is none; the lock's own class, None if it is
    the same; the lock's name; how many fields it is) of every field that a lock guards."""
    for match in _GUARDED_BY.finditer(source):
        # The parser does not see annotations, but its offsets are the file's.
        around = [(name, body) for name, body in classes if body.start_byte < match.start(1) < body.end_byte]
        owner, _, lock = match.group(1).decode().replace("->", ".").rpartition(".")
        if not around:
            yield None, None, lock, 1
            continue
        body = around[-1][1]
        field = next(m for m in body.children if m.start_byte <= match.start(1) < m.end_byte)
        size = _size_of(field, classes) if _is_field(field) else 1
        yield around[-1], _type_of(owner, body) if owner else None, lock, size


def check_file(name, source, checks):
    checks.passed += 1  # it was read
    checks.report_above(MOST_LINES, source.count(b"\n"), name, "lines")
    root = cpp_source.parse(source).root_node
    _check_scopes(name, source, root, checks)
    classes = list(_classes(root))
    place = {body: f"{name}:{body.start_point[0] + 1}: {class_name}" for class_name, body in classes}
    for class_name, body in classes:
        is_struct = body.parent.type == "struct_specifier"
        methods = len(list(_private_methods(class_name, is_struct, body)))
        checks.report_above(MOST_PRIVATE_METHODS, methods, place[body], "private methods")
        checks.classes.setdefault(class_name, place[body])
    for around, owner, lock, size in _guarded_fields(source, classes):
        where = f"{place[around[1]]}::" if around else f"{name}: "
        checks.locks[owner, where, lock] += size
    if name.endswith(".cc"):
        # A class of this file has no other one, and others may have the same name.
        for implemented in set(_implemented(root)) - {class_name for class_name, _ in classes}:
            checks.implementations[implemented].add(name)


def check_implementations(checks):
    """Once all files have been seen: in a .cc, a class and a namespace look alike."""
    files = collections.defaultdict(set)
    for name, found in checks.implementations.items():
        while name not in checks.classes and "::" in name:  # namespace::Class
            name = name.partition("::")[2]
        if name in checks.classes:
            files[name] |= found
    for name, found in files.items():
        text = f"files that implement it ({', '.join(sorted(found))})"
        checks.at_most(MOST_FILES_OF_A_CLASS, len(found), checks.classes[name], text)


def check_locks(checks):
    """Once all files have been seen: a lock's class may be in another one than what it guards."""
    fields = collections.Counter()
    for (owner, where, lock), count in checks.locks.items():
        fields[f"{checks.classes[owner]}::{lock}" if owner in checks.classes else where + lock] += count
    for where, count in fields.items():
        checks.report_above(MOST_GUARDED_FIELDS, count, where, "fields that it guards")


def _sources(directory, folders):
    """(name, text) of each C++ file."""
    for folder in folders:
        for path in sorted((directory / folder).rglob("*")):
            if path.suffix in (".h", ".cc"):
                yield str(path.relative_to(directory)), path.read_bytes()


def check_build_files(directory, checks):
    for folder in LAYERS + USERS:
        for path in sorted((directory / folder).rglob("*")):
            if path.name in ("BUILD", "BUILD.bazel") or path.suffix == ".bzl":
                text = path.read_text()
                for found in _CC_TEST.finditer(text):
                    line = text.count("\n", 0, found.end()) + 1
                    where = f"{path.relative_to(directory)}:{line}"
                    checks.is_true(False, where, "cc_test: use pinion_test or suites_test")


def check_library(directory):
    checks = Checks()
    for name, source in _sources(directory, LAYERS):
        check_file(name, source, checks)
    for name, source in _sources(directory, USERS):
        if name.endswith("_test.cc"):
            _check_test(name, source, checks)
        if re.search(rb"(Scope|Region|Guard)\b", source):  # most have none, and parsing all takes long
            _check_scopes(name, source, cpp_source.parse(source).root_node, checks)
    check_implementations(checks)
    check_locks(checks)
    check_build_files(directory, checks)
    return checks


def main(arguments):
    checks = check_library(pathlib.Path(arguments[0]) if arguments else _TOOLS.parent)
    for large in checks.report:
        print(f"report: {large}")
    for complaint in checks.complaints:
        print(complaint)
    print(f"{checks.passed} passed, {len(checks.complaints)} failed")
    # Nothing to check is not that nothing is wrong.
    return 1 if checks.complaints or not checks.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
