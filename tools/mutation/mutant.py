"""A mutant: one small change of a C++ file that a test should notice."""

import dataclasses

# How the build selects a mutant or the original (see schemata.py).
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
    number: int = 0  # among those that are planted
    node_id: int = dataclasses.field(default=0, compare=False)  # of this parse

    @property
    def change(self):
        return self.summary or f"{short(self.original)} -> {short(self.replacement) or '(nothing)'}"

    @property
    def key(self):
        """Names the mutant by content, so that it is found again after lines have moved."""
        return (self.path, self.source_line, self.change)

    @property
    def name(self):
        return f"{self.path}:{self.line}: {self.kind}: {self.change}"


def short(text):
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:60] + " ... " + text[-25:]
