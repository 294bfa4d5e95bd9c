"""Runs tests, first to see which mutants each of them reaches, then with one mutant at a time."""

import dataclasses
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import schemata

# Limits mutants that allocate without end.
_MOST_RESIDENT_BYTES = 6 << 30
# Limit per binary. Each run of the binary executes one group of test cases, and loads LibTorch first.
_MOST_GROUPS = 8
_TIMEOUT_S = 15
_TIMEOUT_FACTOR = 10


@dataclasses.dataclass
class Group:
    """Test cases of one binary that are run together."""

    label: str
    cases: list  # empty: the whole binary, which knows no cases
    seconds: float = 0
    reached: frozenset = frozenset()


@dataclasses.dataclass
class Outcome:
    killed: bool
    by: str = ""  # test and case, or what else happened
    timed_out: bool = False
    seconds: float = 0


class Runner:
    """`tests` is {name: (binary, working directory, environment)}."""

    def __init__(self, tests, scratch):
        self._tests = tests
        self._scratch = pathlib.Path(scratch)
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._local = threading.local()
        # Gives each run its own /dev/shm, so that a broken program leaves nothing there for others.
        self._isolate = []
        if os.geteuid() == 0 and shutil.which("unshare"):
            command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                self._isolate = command

    def _map_file(self):
        if not hasattr(self._local, "map"):
            fd, self._local.map = tempfile.mkstemp(prefix="reached-", dir=self._scratch)
            os.close(fd)
        with open(self._local.map, "wb") as file:
            file.truncate(schemata.MOST_MUTANTS)
        return self._local.map

    def run(self, name, arguments=(), mutant=None, timeout_s=600, reached=False):
        """(exit code or None after the timeout, output, reached numbers, seconds)."""
        binary, directory, environment = self._tests[name]
        directory = directory if os.path.isdir(directory) else os.path.dirname(binary)
        with tempfile.TemporaryDirectory(prefix="mutant-") as temporary, tempfile.TemporaryFile() as output:
            variables = {
                "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": temporary, "TEST_TMPDIR": temporary, "TMPDIR": temporary,
                "TEST_SRCDIR": os.path.dirname(directory), "RUNFILES_DIR": os.path.dirname(directory),
                "TEST_WORKSPACE": os.path.basename(directory), "USER": os.environ.get("USER", "nobody"), **environment,
                **_passed_on(),
            }
            if mutant is not None:
                variables["PINION_MUTANT"] = str(mutant)
            map_file = self._map_file() if reached else None
            if map_file:
                variables["PINION_MUTANT_REACHED"] = map_file
            start = time.monotonic()
            process = subprocess.Popen(
                [*self._isolate, binary, *arguments], cwd=directory, env=variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_limit,
            )
            code = _wait(process, start + timeout_s)
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind
            except ProcessLookupError:
                pass
            process.wait()
            seconds = time.monotonic() - start
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - 200_000))
            text = output.read().decode(errors="replace")
            numbers = frozenset()
            if map_file:
                data = pathlib.Path(map_file).read_bytes()
                numbers = frozenset(match.start() for match in re.finditer(b"\x01", data))
            return code, text, numbers, seconds

    def groups(self, name):
        binary = self._tests[name][0]
        code, listed, _, _ = self.run(name, ["--gtest_list_tests"], timeout_s=60)
        cases, suite = [], ""
        for line in listed.splitlines():
            if re.match(r"^[\w/<>]+\.(\s+#.*)?$", line):
                suite = line.split("#")[0].strip()
            elif suite and line.startswith("  ") and "DISABLED_" not in line + suite:
                cases.append(suite + line.split("#")[0].strip())
        if code != 0 or not cases:
            return [Group(name, [])]
        per_group = -(-len(cases) // _MOST_GROUPS)
        return [Group(name, cases[i : i + per_group]) for i in range(0, len(cases), per_group)]

    def measure(self, name, key):
        """(groups that pass, groups that fail) without a mutant, and what they reach; `key` names what is run."""
        key = json.dumps([key, _passed_on()], sort_keys=True)
        cache = self._scratch / ("reach-" + re.sub(r"\W", "_", name) + ".json")
        if cache.exists():
            saved = json.loads(cache.read_text())
            if saved["key"] == key:
                good = [Group(name, g["cases"], g["seconds"], frozenset(g["reached"])) for g in saved["good"]]
                return good, [Group(name, cases) for cases in saved["bad"]]
        good, bad = [], []
        for group in self.groups(name):
            code, _, group.reached, group.seconds = self.run(name, _filter(group.cases), reached=True)
            (good if code == 0 else bad).append(group)
        cache.write_text(json.dumps({
            "key": key,
            "good": [{"cases": g.cases, "seconds": g.seconds, "reached": sorted(g.reached)} for g in good],
            "bad": [g.cases for g in bad],
        }))
        return good, bad

    def try_mutant(self, number, path, groups):
        """Runs the groups that reach the mutant, binary by binary, until one fails."""
        by_test = {}
        for group in groups:
            by_test.setdefault(group.label, []).append(group)
        stem = pathlib.Path(path).stem

        def order(name):
            return (not re.search(rf"[:/]{stem}_", name), sum(group.seconds for group in by_test[name]), name)

        start = time.monotonic()
        for name in sorted(by_test, key=order):
            chosen = by_test[name]
            expected = sum(group.seconds for group in chosen)
            cases = [case for group in chosen for case in group.cases]
            code, output, _, _ = self.run(
                name, [*_filter(cases), "--gtest_fail_fast"] if cases else [], mutant=number,
                timeout_s=_TIMEOUT_S + _TIMEOUT_FACTOR * expected,
            )
            if code is None:
                return Outcome(True, name, True, time.monotonic() - start)
            if code != 0 or (cases and "[  PASSED  ]" not in output):
                failed = re.search(r"^\[  FAILED  \] (\S+?)[,\s]", output, re.M)
                running = re.findall(r"^\[ RUN      \] (\S+)", output, re.M)
                case = failed.group(1) if failed else running[-1] if running else ""
                how = "" if failed else f" (ended with {code})"
                return Outcome(True, f"{name} {case}{how}", False, time.monotonic() - start)
        return Outcome(False, seconds=time.monotonic() - start)


def _passed_on():
    """What tests take from the user's environment."""
    return {name: os.environ[name] for name in ("PINION_TEST_PYTHON",) if name in os.environ}


def _filter(cases):
    return ["--gtest_filter=" + ":".join(cases)] if cases else []


def _wait(process, deadline):
    """The exit code; None after the deadline."""
    while time.monotonic() < deadline:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        try:
            pages = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        if pages * resource.getpagesize() > _MOST_RESIDENT_BYTES:
            process.kill()
    return None


def _limit():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
