"""Which changes are made, and where none are."""

import re

# Code inside these nodes does not run, or must be a constant.
SKIPPED = {
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
COMPARISONS = {
    "<": ["<=", ">="],
    "<=": ["<", ">"],
    ">": [">=", "<="],
    ">=": [">", "<"],
    "==": ["!="],
    "!=": ["=="],
}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<="}
CALLEES = {
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
# Functions whose results only people read, and functions with no effect but on time.
MESSAGES = re.compile(
    r"^(absl::)?(StrCat|StrAppend|StrFormat|StrJoin|Substitute)$|^(c10::)?str$|LogIfBad$|HumanBytes$|"
    r"^__builtin_prefetch$|[.>]reserve$"
)
STATUS_MAKER = re.compile(r"^absl::\w+Error$")
CHECKS = re.compile(r"^(PINION_CHECK|TORCH_CHECK\w*|TORCH_INTERNAL_ASSERT\w*)$")
RETURNS_ERROR = {"PINION_RETURN_IF_ERROR", "ThrowIfError"}
# A mutated argument of these functions could affect other processes or files.
DANGEROUS = {"kill", "execv", "execve", "execl", "unlink", "rmdir", "remove"}
WAITS = re.compile(r"(Wait|Order|Record|Synchronize|Join|Fence|Notify)\w*\(")
VALUE_TYPES = re.compile(
    r"^(bool|int|char|double|float|size_t|ssize_t|pid_t|u?int\d+_t|std::size_t|absl::Status|absl::Duration|"
    r"std::string|std::optional<.*>|std::vector<.*>|std::shared_ptr<.*>|std::unique_ptr<.*>)$"
)
DEFAULTS = {"false", "0", "nullptr", "{}", "std::nullopt", "absl::OkStatus()", '""', "0.0"}
