#!/usr/bin/env python3
"""Checks that comments and Markdown are easy to read, by two figures: how many sentences have more
than 25 words, and how many are hard to parse.

Usage: python3 -B tools/check_prose.py [PATH]...           figures by folder, of all tracked files by default
       python3 -B tools/check_prose.py --worst=25 [PATH]...  also the worst sentences, worst first

Prints the figures, the folders above a limit, and "N passed, N failed". Exits 1 if the sum or a
folder is above its limit, or if no sentence was found.

A sentence is hard to parse if the weights of the patterns below that it matches add up to at least
3. They match chained exceptions, pronouns without a noun, and words that docs/maintainers/glossary.md
replaces. The list of worst sentences helps to find text to rewrite. Rewrite the whole paragraph.
"""

import argparse
import collections
import pathlib
import re
import statistics
import subprocess
import sys

MOST_WORDS = 25  # of a sentence that is not long
MOST_LONG = 0.06  # share of long sentences
MOST_HARD = 0.005  # share of sentences that are hard to parse
FOLDER_FACTOR = 2  # a folder may have as many times these shares
LEAST_SENTENCES = 20  # a smaller folder has no limit of its own
HARD_WEIGHT = 3

_NOUN = r"(?! (?:is|are)? ?(?:thread|class|file|function|test|page|table|option))"
_PRONOUN = "What|Who|Whoever|Those|That|Such|Others|Neither|None|Either|One|These"
PATTERNS = {  # name: (expression, weight)
    "exception chain": (r"(?i)\b(but for|unless|other than|save that|as far as|but where|but not|however)\b", 2),
    "no noun": (rf"(^|[.;:,(] *)({_PRONOUN})\b{_NOUN}", 2),
    "what-clause": (r"(?i)\b(of|than|for|with|by|to|in|at|on|about|where|when|until|from|beside|behind) what\b", 2),
    "away/here": (r"(?i)\b(is|are|was|were|be|been|stays?|lies) (away|here|there)\b", 3),
    "let go": (r"(?i)\b(lets?|letting) go\b|\bgoes with\b|\bgone by\b", 3),
    "computed again": (r"(?i)\b(comput|cast|record|plann|tak|ask)\w* (it |them )?again\b", 1),
    "history": (r"(?i)\b(any more|no longer|since then|by now|until now|so far|anymore|was tried|used to)\b", 1),
    "archaic": (r"(?i)\b(as ever|for good|whereof|thereof|therein|the like|beside|nothing else|as such|whatever)\b", 1),
    "is of": (r"(?i)\b(is|are) (of the|another's|its own|theirs|nobody's|somebody's)\b", 2),
    "told/noted": (r"(?i)\b(is|are) (told|noted|asked for|asked)\b", 1),
    "double negative": (r"(?i)\b(not|no|never|nothing)\b[^.;]*\b(not|no|never|nothing|nobody|none)\b", 1),
}
_COMPILED = {name: (re.compile(expression), weight) for name, (expression, weight) in PATTERNS.items()}
_FILES = re.compile(r"\.(h|cc|md|py|bzl)$|BUILD\.bazel$")

Sentence = collections.namedtuple("Sentence", "path line text words hits weight")


def markdown_paragraphs(lines):
    """Yields (line number, text) of paragraphs, list items and table cells; not of code."""
    is_code, text, first = False, [], 1
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("```"):
            is_code, line = not is_code, ""
        if is_code:
            line = ""
        is_row, is_item = line.startswith("|"), re.match(r"\s*([*-]|\d+\.) ", line)
        if text and (not line.strip() or line.startswith("#") or is_row or is_item):
            yield first, " ".join(text)
            text = []
        if is_row:
            for cell in line.strip("|").split("|"):
                if len(cell.split()) > 6:
                    yield number, cell
        elif line.strip() and not line.startswith("#"):
            first = first if text else number
            text.append(re.sub(r"^\s*([*-]|\d+\.) ", "", line.strip()))


def comment_paragraphs(lines, mark):
    """Yields (line number, text) of comments that fill whole lines; not of indented code in them."""
    text, first = [], 0
    for number, line in enumerate([*lines, ""], 1):
        line = line.strip()
        body = line[len(mark):] if line.startswith(mark) else ""
        if not body.strip() or body.startswith("   "):
            if text:
                yield first, " ".join(text)
            text = []
            continue
        first = first if text else number
        text.append(body.strip())


def sentences_of(path, source):
    """Yields a Sentence for each sentence of at least four words."""
    lines = source.split("\n")
    if path.endswith(".md"):
        paragraphs = markdown_paragraphs(lines)
    else:
        paragraphs = comment_paragraphs(lines, "//" if path.endswith((".h", ".cc")) else "#")
    for line, text in paragraphs:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
        text = re.sub(r"`[^`]*`", "X", text)
        text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf)\.", r"\1", text)
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z*_X(])", text):
            words = len(re.findall(r"[A-Za-z][\w'-]*", part))
            if words < 4:
                continue
            hits = [name for name, (pattern, _) in _COMPILED.items() if pattern.search(part)]
            yield Sentence(path, line, part.strip(), words, hits, sum(_COMPILED[name][1] for name in hits))


def folder_of(path):
    """Returns at most two folders of the path: "engine/tier"."""
    return "/".join(path.split("/")[:-1][:2]) or "."


class Figures:
    def __init__(self, sentences):
        self.count = len(sentences)
        self.words = sorted(sentence.words for sentence in sentences)
        self.long = sum(sentence.words > MOST_WORDS for sentence in sentences) / self.count
        self.hard = sum(sentence.weight >= HARD_WEIGHT for sentence in sentences) / self.count

    def row(self, name):
        high = self.words[int(0.95 * self.count)]
        return f"{name:28} {self.count:9} {statistics.median(self.words):7.0f} {high:4} {self.long:10.1%} {self.hard:14.1%}"

    def complaints(self, name, factor):
        for share, most, what in (
            (self.long, MOST_LONG, f"above {MOST_WORDS} words"),
            (self.hard, MOST_HARD, "hard to parse"),
        ):
            if share > factor * most:
                yield f"{name}: {share:.1%} of the sentences are {what}, {factor * most:.1%} at most"


def report(sentences):
    """Returns (rows to print, complaints, how many limits were kept)."""
    rows = [f"{'folder':28} sentences  median  p95  >{MOST_WORDS} words  hard to parse"]
    if not sentences:
        return rows, ["no sentence was found"], 0
    folders = collections.defaultdict(list)
    for sentence in sentences:
        folders[folder_of(sentence.path)].append(sentence)
    checked = [(name, Figures(own), FOLDER_FACTOR) for name, own in sorted(folders.items()) if len(own) >= LEAST_SENTENCES]
    checked.append(("all", Figures(sentences), 1))
    complaints = []
    for name, figures, factor in checked:
        rows.append(figures.row(name))
        complaints += figures.complaints(name, factor)
    return rows, complaints, 2 * len(checked) - len(complaints)


def worst(sentences, count):
    """Yields the worst sentences, by weight and by words above 20."""

    def score(sentence):
        return max(0, sentence.words - 20) / 4 + sentence.weight

    for sentence in sorted(sentences, key=score, reverse=True)[:count]:
        if score(sentence) < HARD_WEIGHT:
            return
        yield f"{sentence.path}:{sentence.line}  {sentence.words} words; {', '.join(sentence.hits)}\n    {sentence.text[:400]}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["."], help="files and folders (all)")
    parser.add_argument("--worst", type=int, default=0, help="how many of the worst sentences to print (0)")
    options = parser.parse_args(arguments)
    listed = subprocess.run(["git", "ls-files", "-z", "--", *options.paths], check=True, capture_output=True, text=True)
    sentences = []
    for path in filter(_FILES.search, listed.stdout.split("\0")):
        if pathlib.Path(path).is_file():  # not one that is deleted in the working tree alone
            sentences += sentences_of(path, pathlib.Path(path).read_text(errors="replace"))
    rows, complaints, passed = report(sentences)
    print("\n".join([*rows, *worst(sentences, options.worst), *complaints]))
    print(f"{passed} passed, {len(complaints)} failed")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
