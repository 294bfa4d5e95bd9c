"""What a run has found, and the table of mutants that are known to change nothing."""

import difflib
import json
import re

from mutants import apply


def read_equivalents(text):
    """{key: proof} from the table: | `file` | `line` | `change` | proof |."""
    known = {}
    for row in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)]
        if len(cells) == 6 and cells[1].startswith("`"):
            path, line, change = (" ".join(cell.strip("`").split()) for cell in cells[1:4])
            known[(path, line, change)] = cells[4]
    return known


def rows_without_mutant(known, mutants):
    """Keys of the table that are no mutant's."""
    return sorted(set(known) - {mutant.key for mutant in mutants})


def table_row(mutant):
    path, line, change = (text.replace("|", "\\|") for text in mutant.key)
    return f"| `{path}` | `{line}` | `{change}` | |"


def diff(source, mutant):
    before = source.decode().splitlines()
    after = apply(source, mutant).decode().splitlines()
    lines = difflib.unified_diff(before, after, mutant.path, mutant.path, lineterm="", n=2)
    return "\n".join(lines)


def layer(path):
    return path.split("/")[0]


def summary(results):
    """[(layer, killed, of them by timeout, survived, not reached)], with a last row for all."""
    rows = []
    for name in sorted({layer(r["path"]) for r in results}) + ["all"]:
        mine = [r for r in results if name in ("all", layer(r["path"]))]
        rows.append((
            name,
            sum(r["state"] == "killed" for r in mine),
            sum(r["timed_out"] for r in mine),
            sum(r["state"] == "survived" for r in mine),
            sum(r["state"] == "not reached" for r in mine),
        ))
    return rows


def share(row):
    _, killed, _, survived, unreached = row
    return 100 * killed / max(1, killed + survived + unreached)


def markdown(command, results, sources, planted, left_out):
    by_number = {mutant.number: mutant for mutant in planted}
    lines = ["# Mutants", "", f"`{command}`", ""]
    lines += ["| layer | mutants | killed | of them by timeout | survived | not reached by any test | killed |", "|" + "---|" * 7]
    for row in summary(results):
        name, killed, timed_out, survived, unreached = row
        lines.append(
            f"| {name} | {killed + survived + unreached} | {killed} | {timed_out} | {survived} | {unreached} | {share(row):.1f} % |"
        )
    for state, title in (("survived", "Survivors"), ("not reached", "Not reached by any test")):
        chosen = [r for r in results if r["state"] == state]
        if not chosen:
            continue
        lines += ["", f"## {title}"]
        for r in chosen:
            mutant = by_number[r["number"]]
            lines += ["", f"### {r['name']}", "", f"in `{mutant.function}`; tests that reach it: {len(r['tests'])}"]
            lines += [f"`{test}`" for test in r["tests"][:6]]
            lines += ["", "```diff", diff(sources.text[mutant.path], mutant), "```", "", table_row(mutant)]
    timed_out = [r for r in results if r["timed_out"]]
    if timed_out:
        lines += ["", "## Killed by a timeout", ""] + [f"* {r['name']}: {r['by']}" for r in timed_out]
    if left_out:
        lines += ["", "## Left out: fail without any mutant", ""]
        lines += [f"* `{' '.join([group.label, *group.cases])}`" for group in left_out]
    return "\n".join(lines) + "\n"


def write_json(path, command, results, left_out):
    rows = [dict(zip(("layer", "killed", "timed_out", "survived", "not_reached"), row)) for row in summary(results)]
    with open(path, "w") as file:
        json.dump({
            "command": command, "summary": rows, "mutants": results,
            "left_out": [{"test": group.label, "cases": group.cases} for group in left_out],
        }, file, indent=1)


def read_alive(path):
    """Keys of the mutants that no test killed, from what write_json wrote."""
    with open(path) as file:
        return {tuple(r["key"]) for r in json.load(file)["mutants"] if r["state"] != "killed"}
