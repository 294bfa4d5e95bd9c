"""Finds the mutants of a C++ file: small changes that a test should notice, one at a time.

A mutant replaces one span of the file. tree-sitter parses it; what it cannot know (types, overloads)
is left to the compiler, which rejects what does not compile (see build.py).
"""

import cpp_source
import finder
from mutant import ENTRY


def find(path, source, following, header=b""):
    """All mutants of the file, in its order. `following` is of enumerators(); `header` is the .h of a .cc."""
    finding = finder.Finder(path, source, following, {**cpp_source.fields(header), **cpp_source.fields(source)})
    finding.walk(cpp_source.parse(source).root_node, finder.Scope())
    unique = {}
    for mutant in finding.found:
        same_place = (mutant.start, mutant.end, mutant.form, mutant.replacement)
        if " ".join(mutant.original.split()) != " ".join(mutant.replacement.split()):
            unique.setdefault(same_place, mutant)
    return sorted(unique.values(), key=lambda m: (m.start, -m.end, m.form, m.replacement))


def apply(source, mutant):
    """The file with the mutant in it."""
    gap = b" " if mutant.form == ENTRY else b""
    return source[: mutant.start] + mutant.replacement.encode() + gap + source[mutant.end :]
