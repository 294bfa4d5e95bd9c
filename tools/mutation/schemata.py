"""Puts mutants into a file's source text, each switched on by its number at run time."""

import dataclasses

import cpp_source
from mutant import ENTRY, EXPRESSION, STATEMENT

MOST_MUTANTS = 1 << 16

# Weak and hidden: one copy per program or shared library. An inline variable would be unique across libraries, which
# would keep a library from being unloaded. PINION_MUTANT is the number of the active mutant. PINION_MUTANT_REACHED is a
# file with one byte per number. The program and its children set a byte when they execute the mutant's place. Nobody needs
# compiler warnings about mutants: an included file is a system header, and build.py has an option for the others.
HEADER = """#ifndef PINION_MUTANT_
#define PINION_MUTANT_
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>
struct PinionMutantState { long on; unsigned char* volatile reached; };
__attribute__((weak, visibility("hidden"))) PinionMutantState pinion_mutant_state = {-1, nullptr};
extern "C" __attribute__((weak, visibility("hidden"), noinline)) void pinion_mutant_begin() {
  const char* const on = getenv("PINION_MUTANT");
  const char* const path = getenv("PINION_MUTANT_REACHED");
  pinion_mutant_state.on = on != nullptr ? atol(on) : -1;
  const int fd = path != nullptr ? open(path, O_RDWR | O_CLOEXEC) : -1;
  void* const map = mmap(nullptr, %(size)d, PROT_READ | PROT_WRITE,
                         fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, fd, 0);
  if (fd >= 0) close(fd);
  if (map == MAP_FAILED) abort();
  pinion_mutant_state.reached = static_cast<unsigned char*>(map);
}
static inline bool PinionMutantIsOn(long number) {
  if (__builtin_expect(pinion_mutant_state.reached == nullptr, 0)) pinion_mutant_begin();
  pinion_mutant_state.reached[number] = 1;
  return pinion_mutant_state.on == number;
}
// What the compiler computes is never mutated.
static constexpr bool PinionMutant(long number) {
  if (std::is_constant_evaluated()) return false;
  return PinionMutantIsOn(number);
}
#endif
#if __INCLUDE_LEVEL__ > 0
#pragma GCC system_header
#endif
#line 1
""" % {"size": MOST_MUTANTS}


@dataclasses.dataclass
class Region:
    """Bytes of the instrumented file that belong to these mutants."""

    start: int
    end: int
    mutants: list


class _Writer:
    def __init__(self, source):
        self.source = source
        self.pieces = []
        self.length = 0
        self.regions = []
        self.by_node = {}  # {id: its mutants}

    def put(self, text):
        data = text if isinstance(text, bytes) else text.encode()
        self.pieces.append(data)
        self.length += len(data)

    def alternative(self, mutant, text):
        start = self.length
        self.put(text)
        self.regions.append(Region(start, self.length, [mutant]))

    def switch(self, mutant):
        return f"PinionMutant({mutant.number})"

    def node(self, node):
        mine = self.by_node.get(node.id, [])
        start = self.length
        for mutant in mine:
            if mutant.form == ENTRY:
                self.put(f"if ({self.switch(mutant)}) {{ ")
                self.alternative(mutant, mutant.replacement)
                self.put(" } ")
        expressions = [mutant for mutant in mine if mutant.form == EXPRESSION]
        statements = [mutant for mutant in mine if mutant.form == STATEMENT]
        if expressions:
            self.put("(")
            for mutant in expressions:
                self.put(f"{self.switch(mutant)} ? (")
                self.alternative(mutant, mutant.replacement)
                self.put(") : ")
            self.put("(")
        for mutant in statements:
            self.put(f"{{ if ({self.switch(mutant)}) {{ ")
            self.alternative(mutant, mutant.replacement)
            self.put(" } else { ")
        position = node.start_byte
        for child in node.children:
            self.put(self.source[position : child.start_byte])
            self.node(child)
            position = child.end_byte
        self.put(self.source[position : node.end_byte])
        self.put(" } }" * len(statements))
        if expressions:
            self.put("))")
        if mine:
            self.regions.append(Region(start, self.length, mine))


def instrument(source, planted):
    """(text, regions)"""
    # Parses anew, because node ids belong to a tree.
    tree = cpp_source.parse(source)
    nodes = {}

    def index(node):
        nodes.setdefault((node.start_byte, node.end_byte), []).append(node)
        for child in node.children:
            index(child)

    index(tree.root_node)
    writer = _Writer(source)
    for mutant in planted:
        if mutant.form == ENTRY:
            candidates = [n for span, ns in nodes.items() if span[0] == mutant.start for n in ns]
            candidates = [n for n in candidates if n.parent.type == "compound_statement"]
        else:
            candidates = nodes[(mutant.start, mutant.end)]
        writer.by_node.setdefault(candidates[0].id, []).append(mutant)
    writer.put(HEADER)
    root = tree.root_node
    writer.put(source[: root.start_byte])
    writer.node(root)
    writer.put(source[root.end_byte :])
    return b"".join(writer.pieces), writer.regions
