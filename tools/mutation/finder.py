"""Walks a file's syntax tree and notes the mutants of each node."""

import dataclasses
import re

import cpp_source
import rules
from mutant import ENTRY, EXPRESSION, STATEMENT, Mutant, short


@dataclasses.dataclass
class Scope:
    function: str = ""
    return_type: str = ""  # "" if unknown
    is_lambda: bool = False
    only_hardened: bool = False
    types: dict = dataclasses.field(default_factory=dict)


class Finder:
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
        return cpp_source.plain(self._source, node, edits)

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
            self.found[-1].summary = f"{self.text(part)} -> {new} in {short(text)}"

    def walk(self, node, scope):
        kind = node.type
        if kind in rules.SKIPPED:
            return
        if kind == "function_definition":
            self._function(node)
        elif kind == "lambda_expression":
            inner = dataclasses.replace(scope, is_lambda=True, return_type="")
            inner.types = {**scope.types, **cpp_source.types_in(self._source, node)}
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
        scope = Scope(function=name, return_type=returns, types={**self._field_types, **cpp_source.types_in(self._source, node)})
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
        return bool(scope.return_type.endswith("*") or rules.VALUE_TYPES.match(scope.return_type))

    @staticmethod
    def _default(scope):
        return "absl::OkStatus()" if scope.return_type == "absl::Status" else "{}"

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
                    kind = "removed wait" if rules.WAITS.search(self.text(value)) else "removed call"
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
            if re.match(r"PINION_(LOG|CHECK)|out$|os$|std::c|.*stream", name):
                return False
        # Operators of streams and strings.
        no_numbers = op in ("<<", ">>") and node.parent.type in ("expression_statement", "condition_clause", "binary_expression")
        no_numbers |= self._is_text(node)
        if op in rules.COMPARISONS:
            for other in rules.COMPARISONS[op]:
                self._replace(scope, "comparison", node, operator, other)
        elif op in ("&&", "||"):
            other = "||" if op == "&&" else "&&"
            self._replace(scope, "boolean operator", node, operator, other)
            for kept, gone in ((left, right), (right, left)):
                text, without = self._plain(kept), self._plain(gone)
                if text is not None and without is not None:
                    summary = f"{short(without)}, operand of {op} -> (nothing)"
                    self._add(scope, "boolean operator", EXPRESSION, node, f"static_cast<bool>({text})", summary)
        elif op in rules.ARITHMETIC and not no_numbers:
            self._replace(scope, "arithmetic", node, operator, rules.ARITHMETIC[op])
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
        other = rules.ASSIGNMENTS.get(self.text(operator))
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
        if callee in rules.DANGEROUS or last in rules.DANGEROUS or rules.MESSAGES.search(callee):
            return False
        if rules.STATUS_MAKER.match(callee):
            if callee != "absl::UnknownError":
                self._replace(scope, "error code", node, function, "absl::UnknownError")
            return False
        if rules.CHECKS.match(callee):
            if callee.startswith("TORCH") and arguments.named_children:
                self.walk(arguments.named_children[0], scope)
            return False
        if re.match(r"^[A-Z][A-Z0-9_]+$", callee) and callee not in rules.RETURNS_ERROR:
            return False
        if last in rules.CALLEES:
            name = function
            while name.named_children and name.type != "identifier" and name.type != "field_identifier":
                name = name.named_children[-1]
            if self.text(name) == last:
                self._replace(scope, "other function", node, name, rules.CALLEES[last])
        values = [child for child in arguments.named_children if child.type != "comment"]
        if callee not in rules.RETURNS_ERROR:
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
        if " ".join(text.split())[len("return ") : -1].strip() not in rules.DEFAULTS:
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
        if rules.CHECKS.match(callee):
            self._add(scope, "removed check", STATEMENT, node, "")
            return
        if rules.MESSAGES.search(callee) or re.split(r"::|\.|->", callee)[-1] in rules.DANGEROUS:
            return
        kind = "removed wait" if rules.WAITS.search(text.split("\n")[0] if len(text) > 200 else text) else "removed statement"
        self._add(scope, kind, STATEMENT, node, "")
        if callee in rules.RETURNS_ERROR:
            arguments = first.child_by_field_name("arguments").named_children
            value = self._plain(arguments[0]) if arguments else None
            if value is not None:
                self._add(scope, "removed check", STATEMENT, node, f"(void)({value});")
