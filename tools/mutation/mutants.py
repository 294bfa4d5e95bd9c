"""Finds the mutants of a C++ file: small changes that a test should notice, one at a time.

A mutant replaces one span of the file. tree-sitter parses it; what it cannot know (types, overloads)
is left to the compiler, which rejects what does not compile (see build.py).
"""

import dataclasses
import re

import tree_sitter
import tree_sitter_cpp

_LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())

# How the build chooses between a mutant and the original (see schemata.py).
EXPRESSION = "expression"  # on ? (mutant) : (original)
STATEMENT = "statement"  # if (on) { mutant } else { original }
ENTRY = "entry"  # if (on) mutant, before the first statement of a function


@dataclasses.dataclass
class Mutant:
    path: str
    line: int  # from 1
    function: str
    kind: str
    form: str
    start: int  # bytes
    end: int
    original: str
    replacement: str
    source_line: str  # the line where it starts, without indentation
    only_hardened: bool = False  # in code that other builds leave out
    summary: str = ""  # of the change, where original and replacement are long and alike
    number: int = 0  # among those of its file
    node_id: int = dataclasses.field(default=0, compare=False)  # of this parse

    @property
    def change(self):
        return self.summary or f"{_short(self.original)} -> {_short(self.replacement) or '(nothing)'}"

    @property
    def key(self):
        """Names the mutant by content, so that it is found again after lines have moved."""
        return (self.path, self.source_line, self.change)

    @property
    def name(self):
        return f"{self.path}:{self.line}: {self.kind}: {self.change}"


def _short(text):
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:60] + " ... " + text[-25:]


# What the parser must not see, or should see as something else. Every replacement has the length of
# what it replaces, so that the parser's offsets are the file's.
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


# Nothing in these runs, or nothing in them may depend on what is known at run time only.
_SKIPPED = {
    "static_assert_declaration",
    "template_argument_list",
    "template_parameter_list",
    "enumerator_list",
    "attribute_declaration",
    "attribute_specifier",
    "alignas_qualifier",
    "requires_clause",
    "requires_expression",
    "noexcept",
    "decltype",
    "sizeof_expression",
    "alignof_expression",
    "string_literal",
    "raw_string_literal",
    "concatenated_string",
    "char_literal",
    "bitfield_clause",
    "optional_parameter_declaration",
    "lambda_capture_specifier",
    "using_declaration",
    "alias_declaration",
    "type_definition",
    "friend_declaration",
    "pure_virtual_clause",
    "parameter_list",
    "preproc_def",
    "preproc_function_def",
    "preproc_call",
    "preproc_include",
    "comment",
    "ERROR",
}
_COMPARISONS = {
    "<": ["<=", ">="],
    "<=": ["<", ">"],
    ">": [">=", "<="],
    ">=": [">", "<"],
    "==": ["!="],
    "!=": ["=="],
}
_ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
_ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<="}
_CALLEES = {
    "min": "max",
    "max": "min",
    "any_of": "all_of",
    "all_of": "any_of",
    "lower_bound": "upper_bound",
    "upper_bound": "lower_bound",
    "front": "back",
    "back": "front",
    "AlignUp": "AlignDown",
    "AlignDown": "AlignUp",
}
# Only people read what these make, or only a clock can tell that they were called.
_MESSAGES = re.compile(
    r"^(absl::)?(StrCat|StrAppend|StrFormat|StrJoin|Substitute)$|^(c10::)?str$|LogIfBad$|HumanBytes$|"
    r"^__builtin_prefetch$|[.>]reserve$"
)
_STATUS_MAKER = re.compile(r"^absl::\w+Error$")
_CHECKS = re.compile(r"^(PINION_CHECK|PINION_DCHECK|TORCH_CHECK\w*|TORCH_INTERNAL_ASSERT\w*)$")
_RETURNS_ERROR = {"PINION_RETURN_IF_ERROR", "ThrowIfError"}
# A mutated argument of these could reach beyond the test.
_DANGEROUS = {"kill", "execv", "execve", "execl", "unlink", "rmdir", "remove"}
_WAITS = re.compile(r"(Wait|Order|Record|Synchronize|Join|Fence|Notify)\w*\(")
_VALUE_TYPES = re.compile(
    r"^(bool|int|char|double|float|size_t|ssize_t|pid_t|u?int\d+_t|std::size_t|absl::Status|absl::Duration|"
    r"std::string|std::optional<.*>|std::vector<.*>|std::shared_ptr<.*>|std::unique_ptr<.*>)$"
)
_DEFAULTS = {"false", "0", "nullptr", "{}", "std::nullopt", "absl::OkStatus()", '""', "0.0"}


@dataclasses.dataclass
class _Scope:
    function: str = ""
    return_type: str = ""  # "" if unknown
    is_lambda: bool = False
    only_hardened: bool = False
    types: dict = dataclasses.field(default_factory=dict)


class _Finder:
    def __init__(self, path, source, following, field_types):
        self._path = path
        self._source = source
        self._lines = source.decode().split("\n")
        self._following = following
        self._field_types = field_types
        self.found = []

    def text(self, node):
        return self._source[node.start_byte : node.end_byte].decode()

    def _plain(self, node, *edits):
        return plain(self._source, node, edits)

    def _add(self, scope, kind, form, node, replacement, summary=""):
        """`node` becomes `replacement`; form ENTRY: `replacement` goes in front of it."""
        line = node.start_point[0] + 1
        original = "" if form == ENTRY else self._plain(node)
        if original is None or replacement is None:
            return
        self.found.append(
            Mutant(
                path=self._path,
                line=line,
                function=scope.function,
                kind=kind,
                form=form,
                start=node.start_byte,
                end=node.start_byte if form == ENTRY else node.end_byte,
                original=original,
                replacement=replacement,
                source_line=" ".join(self._lines[line - 1].split()),
                node_id=node.id,
                summary="at the start -> " + replacement if form == ENTRY else summary,
                only_hardened=scope.only_hardened,
            )
        )

    def _replace(self, scope, kind, node, part, new):
        self._add(scope, kind, EXPRESSION, node, self._plain(node, (part, new)))
        text = self.found[-1].original if self.found else ""
        if len(text) > 90 and self.found[-1].node_id == node.id:
            self.found[-1].summary = f"{self.text(part)} -> {new} in {_short(text)}"

    def walk(self, node, scope):
        kind = node.type
        if kind in _SKIPPED:
            return
        if kind == "function_definition":
            self._function(node)
        elif kind == "lambda_expression":
            inner = dataclasses.replace(scope, is_lambda=True, return_type="")
            inner.types = {**scope.types, **self._types_in(node)}
            if scope.function:
                self._children(node.child_by_field_name("body"), inner)
        elif kind == "field_declaration":
            self._member(node, scope)
        elif kind == "declaration":
            self._declaration(node, scope)
        else:
            handler = getattr(self, "_on_" + kind, None)
            if handler is None or not scope.function or handler(node, scope) is not False:
                self._children(node, scope)

    def _children(self, node, scope):
        if node is not None:
            for child in node.children:
                self.walk(child, scope)

    # ---- declarations

    def _function(self, node):
        body = node.child_by_field_name("body")
        declarator = node.child_by_field_name("declarator")
        type_node = node.child_by_field_name("type")
        if body is None or declarator is None or body.type != "compound_statement":
            return
        returns = self.text(type_node) if type_node else ""
        while declarator.type in ("pointer_declarator", "reference_declarator"):
            returns += "*" if declarator.type == "pointer_declarator" else "&"
            declarator = declarator.named_children[-1]
        name = self.text(declarator).split("(")[0].strip().replace("\n", " ")
        if "->" in self.text(declarator) or returns.endswith("&"):
            returns = ""
        scope = _Scope(function=name, return_type=returns, types={**self._field_types, **self._types_in(node)})
        if type_node is None and "~" in name:
            scope.return_type = "void"
        for child in node.children:
            if child.type == "field_initializer_list":
                self._children(child, scope)
        statements = [child for child in body.named_children if child.type != "comment"]
        if len(statements) >= 2:
            if scope.return_type == "void":
                self._add(scope, "early return", ENTRY, statements[0], "return;")
            elif self._has_default(scope):
                self._add(scope, "early return", ENTRY, statements[0], f"return {self._default(scope)};")
        self._children(body, scope)

    @staticmethod
    def _has_default(scope):
        return bool(scope.return_type.endswith("*") or _VALUE_TYPES.match(scope.return_type))

    @staticmethod
    def _default(scope):
        return "absl::OkStatus()" if scope.return_type == "absl::Status" else "{}"

    def _types_in(self, node):
        """{name: type} of the parameters and variables that are declared in `node`."""
        types = {}

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
                if type_node is not None and declarator is not None and self.text(type_node) != "auto":
                    types[self.text(declarator)] = self.text(type_node) + suffix
            for child in n.children:
                visit(child)

        visit(node)
        return types

    def _is_constant(self, node):
        return any(
            child.type in ("type_qualifier", "storage_class_specifier") and self.text(child) in ("constexpr", "constinit")
            for child in node.children
        )

    def _declaration(self, node, scope):
        if not scope.function or self._is_constant(node):
            return
        type_node = node.child_by_field_name("type")
        for child in node.named_children:
            if child.type != "init_declarator":
                continue
            value = child.child_by_field_name("value")
            if value is not None and value.type == "call_expression" and type_node is not None:
                if self.text(type_node) == "absl::Status":
                    kind = "removed wait" if _WAITS.search(self.text(value)) else "removed call"
                    self._add(scope, kind, EXPRESSION, value, "absl::OkStatus()")
        for child in node.children:
            if child != type_node:
                self.walk(child, scope)

    def _member(self, node, scope):
        if self._is_constant(node) or any(self.text(c) in ("static", "virtual") for c in node.children):
            return
        value = node.child_by_field_name("default_value")
        declarator = node.child_by_field_name("declarator")
        if value is None or (declarator is not None and "function" in declarator.type):
            return
        name = self.text(declarator) if declarator is not None else "?"
        self.walk(value, dataclasses.replace(scope, function=name, return_type="", is_lambda=False))

    # ---- expressions

    def _on_binary_expression(self, node, scope):
        operator = node.child_by_field_name("operator")
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        op = self.text(operator)
        if op in ("<<", ">>"):
            first = node
            while first.type == "binary_expression":
                first = first.child_by_field_name("left")
            name = self.text(first)
            if re.match(r"PINION_(LOG|CHECK|DCHECK)|out$|os$|std::c|.*stream", name):
                return False
        # Streams, strings.
        no_numbers = op in ("<<", ">>") and node.parent.type in ("expression_statement", "condition_clause", "binary_expression")
        no_numbers |= self._is_text(node)
        if op in _COMPARISONS:
            for other in _COMPARISONS[op]:
                self._replace(scope, "comparison", node, operator, other)
        elif op in ("&&", "||"):
            other = "||" if op == "&&" else "&&"
            self._replace(scope, "boolean operator", node, operator, other)
            for kept, gone in ((left, right), (right, left)):
                text, without = self._plain(kept), self._plain(gone)
                if text is not None and without is not None:
                    summary = f"{_short(without)}, operand of {op} -> (nothing)"
                    self._add(scope, "boolean operator", EXPRESSION, node, f"static_cast<bool>({text})", summary)
        elif op in _ARITHMETIC and not no_numbers:
            self._replace(scope, "arithmetic", node, operator, _ARITHMETIC[op])
        return True

    def _is_text(self, node):
        return re.search(r'"|to_string|HumanBytes|name', self.text(node)) is not None

    def _on_unary_expression(self, node, scope):
        operator, argument = node.child_by_field_name("operator"), node.child_by_field_name("argument")
        if operator is not None and self.text(operator) in ("!", "-", "~"):
            text = self._plain(argument)
            if text is not None:
                text = f"static_cast<bool>({text})" if self.text(operator) == "!" else text
                self._add(scope, "removed negation", EXPRESSION, node, text)

    def _on_update_expression(self, node, scope):
        if node.parent.type == "for_statement":
            return False
        operator = node.child_by_field_name("operator")
        self._replace(scope, "arithmetic", node, operator, "--" if self.text(operator) == "++" else "++")

    def _on_assignment_expression(self, node, scope):
        operator = node.child_by_field_name("operator")
        other = _ASSIGNMENTS.get(self.text(operator))
        if other and not self._is_text(node):
            self._replace(scope, "arithmetic", node, operator, other)

    def _on_conditional_expression(self, node, scope):
        self._condition(node.child_by_field_name("condition"), scope, ("false", "true"))

    def _on_number_literal(self, node, scope):
        text = self.text(node)
        match = re.match(r"^(0[xX][0-9a-fA-F']+|-?[0-9']+)([uUlLzZ]*)$", text)
        if match:
            value, suffix = int(match.group(1).replace("'", ""), 0), match.group(2)
            self._add(scope, "constant", EXPRESSION, node, f"{0 if value == 1 else value + 1}{suffix}")  # -1 becomes 0
        else:
            self._add(scope, "constant", EXPRESSION, node, f"({text} * 2 + ({text} == 0))")

    def _on_array_declarator(self, node, scope):
        return False

    def _on_true(self, node, scope):
        if node.parent.type == "condition_clause":  # while (true)
            return
        self._add(scope, "constant", EXPRESSION, node, "false")

    def _on_false(self, node, scope):
        self._add(scope, "constant", EXPRESSION, node, "true")

    def _on_qualified_identifier(self, node, scope):
        parts = self.text(node).split("::")
        following = self._following.get("::".join(parts[-2:])) if len(parts) >= 2 else None
        if following:
            self._add(scope, "constant", EXPRESSION, node, "::".join(parts[:-2] + [following]))
        return False

    def _on_call_expression(self, node, scope):
        function = node.child_by_field_name("function")
        arguments = node.child_by_field_name("arguments")
        callee = self.text(function)
        last = re.split(r"::|\.|->", callee)[-1]
        if callee in _DANGEROUS or last in _DANGEROUS or _MESSAGES.search(callee):
            return False
        if _STATUS_MAKER.match(callee):
            if callee != "absl::UnknownError":
                self._replace(scope, "error code", node, function, "absl::UnknownError")
            return False
        if _CHECKS.match(callee):
            if callee.startswith("TORCH") and arguments.named_children:
                self.walk(arguments.named_children[0], scope)
            return False
        if re.match(r"^[A-Z][A-Z0-9_]+$", callee) and callee not in _RETURNS_ERROR:
            return False
        if last in _CALLEES:
            name = function
            while name.named_children and name.type != "identifier" and name.type != "field_identifier":
                name = name.named_children[-1]
            if self.text(name) == last:
                self._replace(scope, "other function", node, name, _CALLEES[last])
        values = [child for child in arguments.named_children if child.type != "comment"]
        if callee not in _RETURNS_ERROR:
            symmetric = last in ("min", "max", "swap", "mmap")
            for one, other in zip(values, values[1:]):
                if not symmetric and self._swappable(one, other, scope):
                    swapped = self._plain(node, (one, self.text(other)), (other, self.text(one)))
                    self._add(scope, "swapped arguments", EXPRESSION, node, swapped)
        elif values:
            self.walk(values[0], scope)
            return False
        self.walk(function, scope)
        self._children(arguments, scope)
        return False

    def _swappable(self, one, other, scope):
        if self.text(one) == self.text(other):
            return False
        if one.type == other.type == "number_literal":
            return True
        if one.type != "identifier" or other.type != "identifier":
            return False
        first = scope.types.get(self.text(one))
        return first is not None and first == scope.types.get(self.text(other))

    # ---- statements

    def _condition(self, node, scope, values):
        if node is None:
            return
        if node.type == "condition_clause":
            node = node.child_by_field_name("value")
        if node is None or "declaration" in node.type or node.type in ("true", "false"):
            return
        for value in values:
            self._add(scope, "condition", EXPRESSION, node, value)

    def _on_if_statement(self, node, scope):
        if any(child.type == "constexpr" for child in node.children):
            for field in ("consequence", "alternative"):
                child = node.child_by_field_name(field)
                if child is not None:
                    self.walk(child, scope)
            return False
        condition = node.child_by_field_name("condition")
        if "kHardened" in self.text(condition):
            hardened = dataclasses.replace(scope, only_hardened=True)
            self._condition(condition, scope, ("true",))
            self._children(node, hardened)
            return False
        self._condition(condition, scope, ("false", "true"))

    def _on_while_statement(self, node, scope):
        self._condition(node.child_by_field_name("condition"), scope, ("false",))

    def _on_do_statement(self, node, scope):
        if self.text(node.child_by_field_name("condition")) == "(false)":
            return
        self._condition(node.child_by_field_name("condition"), scope, ("false",))

    def _on_for_statement(self, node, scope):
        self._condition(node.child_by_field_name("condition"), scope, ("false",))

    def _on_case_statement(self, node, scope):
        value = node.child_by_field_name("value")
        for child in node.children:
            if child != value:
                self.walk(child, scope)
        return False

    def _on_return_statement(self, node, scope):
        values = [child for child in node.named_children if child.type != "comment"]
        if not values:
            self._add(scope, "removed return", STATEMENT, node, "")
            return
        text = self._plain(node)
        if scope.is_lambda or text is None or not self._has_default(scope):
            return
        default = self._default(scope)
        if " ".join(text.split())[len("return ") : -1].strip() not in _DEFAULTS:
            self._add(scope, "returned value", STATEMENT, node, f"return {default};")

    def _on_break_statement(self, node, scope):
        outer = node.parent
        while outer is not None and outer.type not in (
            "for_statement", "while_statement", "do_statement", "for_range_loop", "switch_statement",
        ):
            outer = outer.parent
        if outer is not None and outer.type != "switch_statement":
            self._add(scope, "removed break", STATEMENT, node, "")

    def _on_continue_statement(self, node, scope):
        self._add(scope, "removed continue", STATEMENT, node, "")

    def _on_expression_statement(self, node, scope):
        if not node.named_children or (node.parent.type == "for_statement" and node.next_sibling is not None):
            return
        expression = node.named_children[0]
        text = self.text(expression)
        if text.startswith(("PINION_LOG", "PINION_TSAN", "TORCH_WARN", "delete")) or re.match(r"^(absl::)?StrAppend\(", text):
            return text.startswith("delete")
        if expression.type not in ("call_expression", "assignment_expression", "update_expression", "binary_expression"):
            return
        first = expression
        while first.type == "binary_expression":
            first = first.child_by_field_name("left")
        callee = ""
        if first.type == "call_expression":
            callee = self.text(first.child_by_field_name("function"))
        if _CHECKS.match(callee):
            self._add(scope, "removed check", STATEMENT, node, "")
            return
        if _MESSAGES.search(callee) or re.split(r"::|\.|->", callee)[-1] in _DANGEROUS:
            return
        kind = "removed wait" if _WAITS.search(text.split("\n")[0] if len(text) > 200 else text) else "removed statement"
        self._add(scope, kind, STATEMENT, node, "")
        if callee in _RETURNS_ERROR:
            arguments = first.child_by_field_name("arguments").named_children
            value = self._plain(arguments[0]) if arguments else None
            if value is not None:
                self._add(scope, "removed check", STATEMENT, node, f"(void)({value});")


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


def _fields(source):
    """{name: type} of what looks like the members of a class."""
    pattern = rb"^\s+(?:mutable )?(?:const )?([\w:<>, ]+?[*&]?) (\w+_)(?: ABSL_\w+\([^)]*\))?(?: = [^;]*|\{[^;]*\})?;"
    return {m.group(2).decode(): m.group(1).decode() for m in re.finditer(pattern, source, re.M)}


def find(path, source, following, header=b""):
    """All mutants of the file, in its order. `following` is of enumerators(); `header` is the .h of a .cc."""
    finder = _Finder(path, source, following, {**_fields(header), **_fields(source)})
    finder.walk(parse(source).root_node, _Scope())
    unique = {}
    for mutant in finder.found:
        same_place = (mutant.start, mutant.end, mutant.form, mutant.replacement)
        if " ".join(mutant.original.split()) != " ".join(mutant.replacement.split()):
            unique.setdefault(same_place, mutant)
    mutants = sorted(unique.values(), key=lambda m: (m.start, -m.end, m.form, m.replacement))
    for number, mutant in enumerate(mutants):
        mutant.number = number
    return mutants


def apply(source, mutant):
    """The file with the mutant in it."""
    gap = b" " if mutant.form == ENTRY else b""
    return source[: mutant.start] + mutant.replacement.encode() + gap + source[mutant.end :]
