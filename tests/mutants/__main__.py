"""Mutates opfuse's compiler, core and recipes, and says which changes no test noticed: ``python -m tests.mutants --count 200``.

The first run measures which test runs which line, which takes as long as the tests. That and the verdicts are kept in .mutants,
so a run that was stopped goes on where it was. docs/mutants.md says why survivors survive.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.mutants import hunt, suite


def main(arguments: list[str] | None = None) -> int:
    """0 if the survivors are no more than ``--most`` percent."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--count", type=int, default=200, help="how many")
    parser.add_argument("--packages", nargs="+", default=list(hunt.PACKAGES), metavar="PATH", help="folders or files to mutate")
    parser.add_argument("--tests", nargs="+", type=Path, metavar="FILE", help="files of tests; by default all that may matter")
    parser.add_argument("--least", type=float, default=30, help="seconds that a mutant may take beside its tests")
    parser.add_argument("--cache", type=Path, default=hunt.CACHE, help="folder of what earlier runs found")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant, at most")
    parser.add_argument("--most", type=float, default=5, help="percent of survivors that are still no failure")
    parser.add_argument("--out", type=Path, help="the report, by default report.json in the cache; beside it a page, .md")
    options = parser.parse_args(arguments)

    start = time.monotonic()
    tests = [path.resolve() for path in options.tests] if options.tests else suite.files()
    out = options.out or options.cache / "report.json"
    measured = hunt.coverage(options.cache / "coverage", tests, options.packages, options.jobs, tell)
    kept = hunt.Kept(options.cache / "verdicts.jsonl", hunt.digest(*tests))
    wanted = hunt.chosen(options.seed, options.count, options.packages)
    found = [verdict for mutant in wanted if (verdict := kept.get(mutant))]
    tell(f"mutants: {len(wanted)} chosen by seed {options.seed}, {len(found)} known from earlier runs")
    done = {verdict.mutant for verdict in found}
    left = [mutant for mutant in wanted if mutant not in done]
    for number, verdict in enumerate(hunt.verdicts(left, measured, options.jobs, options.budget, options.least), 1):
        kept.put(verdict)
        found.append(verdict)
        by = f" by {verdict.by}" if verdict.by else f", {verdict.ran} of {verdict.tests} tests ran"
        tell(f"{number}/{len(left)} {time.monotonic() - start:.0f} s: {verdict.mutant.name} {verdict.state}{by}")
    order = {mutant: place for place, mutant in enumerate(wanted)}
    found.sort(key=lambda verdict: order[verdict.mutant])
    write(out, options.seed, found)
    survivors = sum(verdict.survived for verdict in found)
    percent = 100 * survivors / max(len(found), 1)
    tell(f"mutants: {survivors} of {len(found)} survived, {percent:.1f} % (at most {options.most:g}); {out}")
    return int(percent > options.most)


def write(file: Path, seed: int, found: list[hunt.Verdict]) -> None:
    """The report as JSON, and as a page with the survivors."""
    file.parent.mkdir(parents=True, exist_ok=True)
    survivors = [verdict for verdict in found if verdict.survived]
    summary = {"seed": seed, "mutants": len(found), "survived": len(survivors)}
    verdicts = [{**asdict(verdict), "name": verdict.mutant.name} for verdict in found]
    file.write_text(json.dumps({**summary, "verdicts": verdicts}, indent=1) + "\n")
    rows = [
        f"| `{mutant.file}:{mutant.line}` | {mutant.operator} | {cell(mutant.before)} | {cell(mutant.after)} | {verdict.state} |"
        for verdict in survivors
        for mutant in (verdict.mutant,)
    ]
    head = f"# Mutants of seed {seed}\n\n{len(survivors)} of {len(found)} survived.\n"
    table = ["| place | change | before | after | what became of it |", "| --- | --- | --- | --- | --- |", *rows]
    file.with_suffix(".md").write_text(head + "\n" + "\n".join(table) + "\n")


def cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`"


def tell(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
