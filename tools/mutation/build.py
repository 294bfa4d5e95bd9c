"""Builds the tests of a copy of the tree in which the planted mutants sleep."""

import collections
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import cpp_source
import schemata
from mutants import find

_ERROR = re.compile(r"^(\S+?\.(?:h|cc)):(\d+):(\d+): (?:fatal )?error: (.*)")
_PLACE = re.compile(r"^(?:In file included from |\s+from )?(\S+?\.(?:h|cc)):(\d+):(\d+)?")
_HEADER_LINES = schemata.HEADER.count("\n")


class BuildError(Exception):
    pass


def library_files(root, layers):
    """The .h and .cc files of the layers."""
    listed = _listed(root, *layers)
    return sorted(path for path in listed if path.endswith((".h", ".cc")))


def _listed(root, *paths):
    """What git tracks, and what it would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in listed if (pathlib.Path(root) / path).is_file()]


class Sources:
    """The files of the library with all their mutants."""

    def __init__(self, root, paths):
        self.text = {path: (pathlib.Path(root) / path).read_bytes() for path in paths}
        following = cpp_source.enumerators(self.text.values())
        self.mutants = []
        for path in paths:
            header = self.text.get(path[:-2] + "h", b"") if path.endswith(".cc") else b""
            self.mutants += find(path, self.text[path], following, header)


class Tree:
    """A copy of the tree under `scratch`, with bazel's output beside it. The user's own tree is only read."""

    def __init__(self, root, scratch, say, hardened=False):
        self.root = pathlib.Path(root)
        self.path = pathlib.Path(scratch) / "tree"
        self._output_base = pathlib.Path(scratch) / "bazel"
        self._rejected_file = pathlib.Path(scratch) / "does_not_compile.json"
        self._say = say
        self._hardened = hardened
        self.path.mkdir(parents=True, exist_ok=True)
        # Per file: its text when mutants were rejected, and those mutants, which do not compile.
        self._rejected = json.loads(self._rejected_file.read_text()) if self._rejected_file.exists() else {}

    def is_rejected(self, mutant):
        return mutant.path in self._rejected and _place(mutant) in self._rejected[mutant.path]["mutants"]

    def reject(self, mutants):
        for mutant in mutants:
            self._rejected[mutant.path]["mutants"].append(_place(mutant))
        self._rejected_file.write_text(json.dumps(self._rejected))

    def forget_other_texts(self, sources):
        """A mutant that did not compile may do so once its file has changed."""
        for path, text in sources.text.items():
            digest = hashlib.sha256(text).hexdigest()
            if path not in self._rejected or self._rejected[path]["digest"] != digest:
                self._rejected[path] = {"digest": digest, "mutants": []}

    def sync(self, changed):
        """Makes the copy what the tree is, but for the files in `changed`: {path: bytes}."""
        wanted = set(_listed(self.root))
        old = {str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file() and not p.is_symlink()}
        for path in old - wanted - {"user.bazelrc"}:
            (self.path / path).unlink()
        for path in wanted:
            source, target = self.root / path, self.path / path
            data = changed.get(path) or source.read_bytes()
            if target.is_file() and target.read_bytes() == data:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(source.stat().st_mode & 0o777)
        venv = self.path / ".venv"
        if not venv.is_symlink():
            venv.symlink_to((self.root / ".venv").resolve())
        user = self.root / "user.bazelrc"
        flags = user.read_text() if user.exists() else ""
        (self.path / "user.bazelrc").write_text(flags)

    def _bazel(self, *arguments, **kwargs):
        return subprocess.run(
            ["./bazelw", f"--output_base={self._output_base}", *arguments],
            cwd=self.path, text=True, env={**os.environ, "PINION_SKIP_INSTALL": "1"}, **kwargs,
        )

    def _flags(self, changed=()):
        # Files without mutants have the options of every other build, so that they are compiled once. The assertions make
        # mutants that read beyond the end of a container fail, as in the sanitizers' builds.
        folders = "|".join(sorted({os.path.dirname(path) for path in changed}))
        flags = ["--config=opt", "--symlink_prefix=/", "--color=no", "--curses=no"]
        if folders:
            flags.append(f"--per_file_copt=//({folders}):.*@-w,-D_GLIBCXX_ASSERTIONS")
        if self._hardened:
            flags += ["--//config:hardening", "--//config:chunk_mib=64"]
        return flags

    def build(self, sources, planted, targets):
        """Builds with those planted mutants that compile, and returns them; the others are remembered, see is_rejected."""
        assert len(planted) <= schemata.MOST_MUTANTS, "more mutants than numbers"
        for number, mutant in enumerate(planted):
            mutant.number = number
        for attempt in range(1, 13):
            regions, changed = {}, {}
            by_path = collections.defaultdict(list)
            planted = [mutant for mutant in planted if not self.is_rejected(mutant)]
            for mutant in planted:
                by_path[mutant.path].append(mutant)
            for path, of_path in by_path.items():
                changed[path], regions[path] = schemata.instrument(sources.text[path], of_path)
            if attempt == 1:
                self.sync(changed)
            else:  # not again: the tree may have changed meanwhile
                for path, text in changed.items():
                    if (self.path / path).read_bytes() != text:
                        (self.path / path).write_bytes(text)
            self._say(f"building {len(planted)} mutants at once, attempt {attempt}")
            log = self.path.parent / "build.log"
            with open(log, "w") as out:
                done = self._bazel("build", *self._flags(by_path), "-k", *targets, stdout=out, stderr=subprocess.STDOUT)
            if done.returncode == 0:
                return planted
            bad = self._culprits(log.read_text(), changed, regions)
            if not bad:
                raise BuildError(f"the build fails, and not for a mutant: see {log}")
            self._say(f"{len(bad)} mutants do not compile, e.g. {bad[0].name}")
            self.reject(bad)
        raise BuildError("mutants that do not compile are still left")

    def _culprits(self, log, changed, regions):
        lines = log.splitlines()
        found = {}
        for i, line in enumerate(lines):
            error = _ERROR.match(line)
            if not error:
                continue
            # The error's own place, else the macros and templates in the lines around it.
            around = [line] + lines[i + 1 : i + 12] + lines[max(0, i - 12) : i][::-1]
            for place in around:
                if place is not line and _ERROR.match(place):
                    continue
                match = _PLACE.match(place)
                path = _own_path(match.group(1), changed) if match else None
                if path is None:
                    continue
                hits = self._at(changed[path], regions[path], int(match.group(2)), int(match.group(3) or 0))
                if hits:
                    found.update({id(mutant): mutant for mutant in hits})
                    break
        return list(found.values())

    @staticmethod
    def _at(text, regions, line, column):
        starts = [0]
        for newline in re.finditer(rb"\n", text):
            starts.append(newline.end())
        line += _HEADER_LINES
        if line > len(starts):
            return []
        begin = starts[line - 1]
        end = starts[line] if line < len(starts) else len(text)
        at = begin + max(column, 1) - 1
        around = [region for region in regions if column and region.start <= at < region.end]
        if around:
            return min(around, key=lambda region: region.end - region.start).mutants
        return [mutant for region in regions if region.start < end and begin < region.end for mutant in region.mutants]

    def tests(self, targets):
        """{label: (binary, runfiles, environment)} of the C++ tests among the targets."""
        query = " + ".join(f"kind(cc_test, tests({target}))" for target in targets)
        xml = self._bazel("query", "--output=xml", "--color=no", query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if xml.returncode:
            raise BuildError(f"bazel query {query} fails")
        bin_path = self._bazel(
            "info", *self._flags(), "bazel-bin", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout.strip()
        result = {}
        text = re.sub(r"<\?xml[^>]*\?>", "", xml.stdout)
        for rule in ElementTree.fromstring(text).iter("rule"):
            label = rule.get("name")
            environment = {}
            for table in rule.findall("dict"):
                if table.get("name") == "env":
                    for pair in table.findall("pair"):
                        name, value = (string.get("value") for string in pair.findall("string"))
                        environment[name] = value
            binary = os.path.join(bin_path, label[2:].replace(":", "/"))
            if os.path.exists(binary):
                result[label] = (binary, binary + ".runfiles/pinion", environment)
            else:
                print(f"no {binary}", file=sys.stderr)
        return result


def _own_path(path, changed):
    path = path.removeprefix("./")  # of a folder's one file
    if path in changed:
        return path
    if "/pinion/" in path:
        tail = path.rsplit("/pinion/", 1)[1]
        if tail in changed:
            return tail
    return None


def _place(mutant):
    """Tells it from all other mutants of the same text."""
    return [mutant.start, mutant.end, mutant.form, mutant.replacement]


@functools.lru_cache(maxsize=None)
def _digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def digest(binary, runfiles):
    """Of a test program and of what it runs with: the library's parts, which it links dynamically, and its data. Not of
    LibTorch's and CUDA's libraries, which are in folders of their own."""
    names = [""]
    for folder, folders, files in os.walk(runfiles):
        folders[:] = [name for name in folders if not name.startswith("_U@")]
        names += [os.path.relpath(os.path.join(folder, name), runfiles) for name in files]
    paths = {name: os.path.realpath(os.path.join(runfiles, name) if name else binary) for name in names}
    lines = [f"{name} {_digest(path)}" for name, path in sorted(paths.items()) if os.path.isfile(path)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
