"""What is known of a C++ file's text without a compiler."""

import re

import tree_sitter
import tree_sitter_cpp

_LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())

# Text that the parser must not see, or must see in another form. A replacement has the same length,
# so that the parser's offsets are valid in the file.
_ANNOTATION = re.compile(
    rb"\bABSL_(GUARDED_BY|PT_GUARDED_BY|EXCLUSIVE_LOCKS_REQUIRED|SHARED_LOCKS_REQUIRED|LOCKS_EXCLUDED|"
    rb"EXCLUSIVE_LOCK_FUNCTION|UNLOCK_FUNCTION|EXCLUSIVE_TRYLOCK_FUNCTION|ASSERT_EXCLUSIVE_LOCK|"
    rb"ACQUIRED_AFTER|ACQUIRED_BEFORE|LOCK_RETURNED)\s*\([^()]*(\([^()]*\)[^()]*)*\)"
    rb"|\bABSL_(NO_THREAD_SAFETY_ANALYSIS|LOCKABLE|SCOPED_LOCKABLE|CONST_INIT|ATTRIBUTE_\w+)\b|\[\[\w+\]\]"
)
_ASSIGN_OR_RETURN = re.compile(rb"\bPINION_ASSIGN_OR_RETURN\(")


def _mask(source):
    text = bytearray(_ANNOTATION.sub(lambda m: re.sub(rb"[^\n]", b" ", m.group()), source))
    for match in _ASSIGN_OR_RETURN.finditer(bytes(text)):
        if bytes(text[text.rfind(b"\n", 0, match.start()) + 1 : match.start()]).lstrip().startswith(b"#"):
            continue
        depth, comma, i = 1, None, match.end()
        while depth and i < len(text):
            if text[i] in b"({[":
                depth += 1
            elif text[i] in b")}]":
                depth -= 1
            elif text[i] == ord(",") and depth == 1 and comma is None:
                comma = i
            i += 1
        if depth or comma is None:
            continue
        text[match.start() : match.end()] = b" " * (match.end() - match.start())
        text[comma] = ord("=")
        text[i - 1] = ord(" ")
    return bytes(text)


def parse(source):
    return tree_sitter.Parser(_LANGUAGE).parse(_mask(source))


def enumerators(sources):
    """Of every enum class in the files: {"Enum::kName": "Enum::kNextName"}."""
    following, seen = {}, set()
    for source in sources:
        for match in re.finditer(rb"\benum class (\w+)[^{;]*\{([^}]*)\}", source):
            body = re.sub(rb"//[^\n]*", b"", match.group(2)).decode()
            names = [part.split("=")[0].strip() for part in body.split(",")]
            names = [name for name in names if name]
            enum = match.group(1).decode()
            if enum in seen:  # of two classes: which one is meant, only a compiler knows
                following = {name: after for name, after in following.items() if not name.startswith(enum + "::")}
                continue
            seen.add(enum)
            for name, after in zip(names, names[1:] + names[:1]):
                if name != after:
                    following[f"{enum}::{name}"] = f"{enum}::{after}"
    return following


def plain(source, node, edits=()):
    """The node's text on one line, without comments, with [(part, new text)] replaced; None if it has a preprocessor
    line or a raw string inside."""
    replaced = {(part.start_byte, part.end_byte): new for part, new in edits}
    pieces = []
    position = node.start_byte

    def visit(n):
        nonlocal position
        if n.type.startswith("preproc") or n.type == "raw_string_literal":
            return False
        new = replaced.get((n.start_byte, n.end_byte))
        if new is None and n.type == "comment":
            new = " "
        if new is not None:
            pieces.append(source[position : n.start_byte].decode())
            pieces.append(new)
            position = n.end_byte
            return True
        return all(visit(child) for child in n.children)

    if not visit(node):
        return None
    pieces.append(source[position : node.end_byte].decode())
    return "".join(pieces).replace("\n", " ")


def fields(source):
    """{name: type} of what looks like the members of a class."""
    pattern = rb"^\s+(?:mutable )?(?:const )?([\w:<>, ]+?[*&]?) (\w+_)(?: ABSL_\w+\([^)]*\))?(?: = [^;]*|\{[^;]*\})?;"
    return {m.group(2).decode(): m.group(1).decode() for m in re.finditer(pattern, source, re.M)}


def types_in(source, node):
    """{name: type} of the parameters and variables that are declared in `node`."""
    types = {}

    def text(n):
        return source[n.start_byte : n.end_byte].decode()

    def visit(n):
        if n.type in ("parameter_declaration", "declaration"):
            type_node = n.child_by_field_name("type")
            declarator = n.child_by_field_name("declarator")
            suffix = ""
            while declarator is not None and declarator.type != "identifier":
                if declarator.type == "pointer_declarator":
                    suffix += "*"
                declarator = declarator.child_by_field_name("declarator") or (
                    declarator.named_children[-1] if declarator.type == "reference_declarator" else None
                )
            if type_node is not None and declarator is not None and text(type_node) != "auto":
                types[text(declarator)] = text(type_node) + suffix
        for child in n.children:
            visit(child)

    visit(node)
    return types
