"""tools/mutate: see --help and docs/maintainers/testing.md."""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import random
import shlex
import sys
import time

import build
import report
import runs

# Mutants that change nothing.
_TABLE = "tools/mutation/equivalent_mutants.md"
_LAYERS = ["allocator", "device", "engine", "hooks"]
# The tests of a layer, and other tests that run its code.
_TESTS = {
    "allocator": ["//tests/allocator/..."],
    "device": ["//tests/device/...", "//tests/engine/..."],
    "engine": ["//tests/engine/...", "//tests/device/cuda/..."],
    "hooks": ["//tests/hooks/...", "//tests/shared/..."],
}


def choose(mutants, seed, count):
    """At most one mutant of a line, so that a few long lines do not make up the sample."""
    order = sorted(mutants, key=lambda mutant: (mutant.path, mutant.start, mutant.end, mutant.change))
    random.Random(seed).shuffle(order)
    lines, chosen = set(), []
    for mutant in order:
        if len(chosen) < count and (mutant.path, mutant.line) not in lines:
            lines.add((mutant.path, mutant.line))
            chosen.append(mutant)
    return chosen


def measure(runner, tests, jobs, say):
    """({name: groups that pass}, groups that fail without any mutant)."""
    groups, left_out, done = {}, [], 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(runner.measure, name, build.digest(*tests[name][:2])): name for name in tests}
        for future in concurrent.futures.as_completed(running):
            name = running[future]
            groups[name], bad = future.result()
            done += 1
            say(f"[{done}/{len(tests)}] {name}: {sum(g.seconds for g in groups[name]):.1f} s")
            left_out += bad
            for group in bad:
                say(f"  fails without any mutant, and is left out: {name} {' '.join(group.cases)}")
    return groups, left_out


def try_all(runner, planted, groups_of, jobs, say):
    """One result per mutant, in the order of `planted`."""

    def try_one(mutant):
        reaching = [g for g in groups_of(mutant) if mutant.number in g.reached]
        outcome = runner.try_mutant(mutant.number, mutant.path, reaching) if reaching else runs.Outcome(False)
        state = "killed" if outcome.killed else "survived" if reaching else "not reached"
        return {
            "name": mutant.name, "key": mutant.key, "path": mutant.path, "line": mutant.line, "kind": mutant.kind, "number": mutant.number,
            "state": state, "by": outcome.by, "timed_out": outcome.timed_out, "seconds": round(outcome.seconds, 1),
            "tests": sorted({g.label for g in reaching}),
        }

    results, done = {}, 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(try_one, mutant): i for i, mutant in enumerate(planted)}
        for future in concurrent.futures.as_completed(running):
            result = results[running[future]] = future.result()
            done += 1
            by = f" by {result['by']}" if result["by"] else ""
            late = " (timeout)" if result["timed_out"] else ""
            say(f"[{done}/{len(planted)}] {result['state']}{by}{late} in {result['seconds']} s: {result['name']}")
    return [results[i] for i in sorted(results)]


def main(arguments):
    root = pathlib.Path(__file__).absolute().parents[2]
    parser = argparse.ArgumentParser(
        prog="tools/mutate",
        description="Plants bugs in a copy of the library, one at a time, and reports those that no test notices.",
    )
    parser.add_argument("--seed", type=int, default=None, help="which mutants; another one each day unless given")
    parser.add_argument("--count", type=int, default=200, help="how many (200)")
    parser.add_argument("--paths", nargs="+", default=_LAYERS, help="directories or files of the library (all layers)")
    parser.add_argument("--tests", nargs="+", help="bazel targets (those of the layers that are mutated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="test programs at a time (all processors)")
    parser.add_argument("--only", help="run the mutants whose name contains this, instead of a sample")
    parser.add_argument("--again", help="run those that no test killed in this file of an earlier --json")
    parser.add_argument("--hardened", action="store_true", help="mutate what hardened builds check, in such a build")
    parser.add_argument("--report", help="write survivors with their diff to this file (markdown)")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--list", action="store_true", help="print all mutants and stop; fails if " + _TABLE + " names others")
    parser.add_argument("--scratch", help="where the copy is built (~/.cache/pinion_mutate/...)")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = int(time.strftime("%Y%m%d"))
    start = time.monotonic()

    def say(text):
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    sys.setrecursionlimit(20000)
    sources = build.Sources(root, build.library_files(root, _LAYERS))
    wanted = set()
    for path in options.paths:
        named = {p for p in sources.text if p == path or p.startswith(path.rstrip("/") + "/")}
        if not named:
            parser.error(f"--paths: {path} is no file or directory of {', '.join(_LAYERS)} (paths start at the root of the tree)")
        wanted |= named
    layers = [layer for layer in _LAYERS if any(report.layer(path) == layer for path in wanted)]
    mutants = [m for m in sources.mutants if m.path in wanted]
    if not options.hardened:
        mutants = [m for m in mutants if not m.only_hardened and not m.path.startswith("allocator/heap/hardening.")]
    known = report.read_equivalents((root / _TABLE).read_text())
    stale = report.rows_without_mutant(known, sources.mutants)
    for path, line, change in stale:
        print(f"{_TABLE} has a row that is no mutant's: {path}: {line}: {change}", file=sys.stderr)
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 1 if stale else 0

    default = os.path.join("~/.cache/pinion_mutate", hashlib.sha256(str(root).encode()).hexdigest()[:8])
    scratch = pathlib.Path(options.scratch or default).expanduser()
    tree = build.Tree(root, scratch, say, options.hardened)
    tree.forget_other_texts(sources)
    possible = [m for m in mutants if not tree.is_rejected(m) and m.key not in known]
    say(f"{len(mutants)} mutants, {sum(m.key in known for m in mutants)} change nothing")
    if options.again:
        alive = report.read_alive(options.again)
        chosen = [m for m in possible if m.key in alive]
    elif options.only:
        chosen = [m for m in possible if options.only in m.name]
    else:
        chosen = choose(possible, options.seed, options.count)
    targets = {layer: options.tests or _TESTS[layer] for layer in layers}
    planted = tree.build(sources, chosen, sorted({target for of_layer in targets.values() for target in of_layer}))

    labels = {layer: tree.tests(of_layer) for layer, of_layer in targets.items()}
    tests = {name: test for of_layer in labels.values() for name, test in of_layer.items()}
    runner = runs.Runner(tests, scratch / "runs")
    say(f"seeing what {len(tests)} test programs reach")
    groups, left_out = measure(runner, tests, options.jobs, say)

    def groups_of(mutant):
        return [group for name in labels[report.layer(mutant.path)] for group in groups[name]]

    results = try_all(runner, planted, groups_of, options.jobs, say)
    command = f"tools/mutate {shlex.join(arguments)}" + ("" if "--seed" in arguments else f" --seed {options.seed}")
    text = report.markdown(command, results, sources, planted, left_out)
    if options.report:
        pathlib.Path(options.report).write_text(text)
    if options.json:
        report.write_json(options.json, command, results, left_out)
    if not options.report:
        print(text)
    for row in report.summary(results):
        say(f"{row[0]}: {row[1]} killed ({row[2]} by timeout), {row[3]} survived, {row[4]} not reached: {report.share(row):.1f} %")
    if left_out:
        say(f"{len(left_out)} groups of test cases fail without any mutant, and were left out")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
