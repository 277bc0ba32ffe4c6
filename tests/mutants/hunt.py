"""Chooses mutants by a seed, finds the tests that run their lines, and sees whether one of these fails."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants import suite
from tests.mutants.operators import Mutant, mutants

ROOT = suite.ROOT
Tell = Callable[[str], None]
PACKAGES = ("opfuse/compiler", "opfuse/core", "opfuse/inspect", "opfuse/recipes", "opfuse/runtime")
CACHE = ROOT / ".mutants"
FIRST = 25
"""So many of the fastest tests run before the files of the others are even imported."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``killed`` by a test, by ``timeout``, by an error on ``import``; or ``survived``, ``uncovered``.
    ``tests``: how many could notice it; ``ran``: how many were run."""

    mutant: Mutant
    state: str
    by: str
    tests: int
    ran: int

    @property
    def survived(self) -> bool:
        return self.state in ("survived", "uncovered")


def modules(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Files of these packages, or these files, from the root."""
    found = [
        path for name in packages for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    return [str(path.relative_to(ROOT)) for path in found]


def chosen(seed: int, count: int, packages: Sequence[str] = PACKAGES) -> list[Mutant]:
    """``count`` mutants of these packages: the same for the same seed and source, and more of them begin with these."""
    every = [mutant for file in modules(packages) for mutant in mutants(ROOT, file)]
    random.Random(seed).shuffle(every)
    return every[:count]


# Coverage ----------------------------------------------------------------------------------------------------------------------


def digest(*paths: Path) -> str:
    made = hashlib.sha256()
    for path in paths:
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def coverage(folder: Path, paths: Sequence[Path], packages: Sequence[str], workers: int, tell: Tell) -> suite.Coverage:
    """Which test of ``paths`` runs which line of ``packages``; measured anew for files that changed, or for all if packages did.

    SystemExit if a file could not be measured: what only its tests run would seem to be run by none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, missing, found = digest(*(ROOT / file for file in modules(packages))), [], []
    for path in paths:
        kept = folder / f"{'.'.join(path.relative_to(suite.TESTS).with_suffix('').parts)}.json"
        wanted = f"{source} {digest(path)}"
        entry = json.loads(kept.read_text()) if kept.exists() else {}
        if entry.get("digest") == wanted:
            found.append(entry)
        else:
            missing.append((path, kept, wanted))
    missing.sort(key=lambda each: -each[0].stat().st_size)
    jobs = (suite.Job(each, lambda path=each[0]: suite.measured(path, modules(packages)), 1800) for each in missing)  # type: ignore[misc]
    if missing and importlib.util.find_spec("coverage") is None:
        raise SystemExit("coverage: the package of this name is not installed; pip install '.[test]'")
    lost = []
    for number, (job, entry) in enumerate(suite.each(jobs, workers), 1):
        path, kept, wanted = job.name
        where = path.relative_to(ROOT)
        if entry is None:
            tell(f"coverage {number}/{len(missing)}: {where} broke off")
            lost.append(str(where))
            continue
        left = f"; left out, as they fail: {', '.join(entry['failed'])}" if entry["failed"] else ""
        tell(f"coverage {number}/{len(missing)}: {where}, {len(entry['seconds'])} tests{left}")
        kept.write_text(json.dumps({"digest": wanted, **entry}))
        found.append(entry)
    if lost:
        raise SystemExit(f"coverage: nothing is known of {', '.join(lost)}; MUTANTS_LOG=FILE keeps what pytest says")
    return joined(found)


def joined(entries: Sequence[Any]) -> suite.Coverage:
    """The coverage of several files."""
    lines: dict[str, dict[int, set[str]]] = {}
    seconds: dict[str, float] = {}
    for entry in entries:
        seconds |= entry["seconds"]
        for test, files in entry["lines"].items():
            for file, ran in files.items():
                for line in ran:
                    lines.setdefault(file, {}).setdefault(line, set()).add(test)
    return suite.Coverage({file: {line: frozenset(t) for line, t in ran.items()} for file, ran in lines.items()}, seconds)


# Killing -----------------------------------------------------------------------------------------------------------------------


def verdicts(wanted: Sequence[Mutant], measured: suite.Coverage, workers: int, budget: float, least: float) -> Iterator[Verdict]:
    """What becomes of each mutant. budget: seconds of tests at most for one; what is left then has survived. least: seconds of
    processor time that a child may take beside its tests, before it counts as never ending."""
    jobs = []
    for mutant in wanted:
        every = measured.tests(mutant.file, mutant.span)
        tests, spent = [], 0.0
        for test in every:
            spent += measured.seconds[test]
            if tests and spent > budget:
                break
            tests.append(test)
        if tests:
            seconds = least + 5 * sum(measured.seconds[test] for test in tests)
            jobs.append(suite.Job((mutant, len(every)), lambda m=mutant, t=tests: attempt(m, t, measured, least), seconds))  # type: ignore[misc]
        else:
            yield Verdict(mutant, "uncovered", "", 0, 0)
    for job, answer in suite.each(iter(jobs), workers):
        mutant, count = job.name
        state, by, ran = answer or ("killed", "timeout or crash", 0)
        yield Verdict(mutant, state, by, count, ran)


def attempt(mutant: Mutant, tests: Sequence[str], measured: suite.Coverage, least: float) -> tuple[str, str, int]:
    """In a child: import with the mutant in place, and run these tests, in this order, up to the first that fails."""
    install(mutant)
    ran = 0
    for part in (tests[:FIRST], tests[FIRST:]):
        if not part:
            continue
        plugin = suite.Chosen(part, {test: least + 5 * measured.seconds[test] for test in part})
        code = suite.run(list(dict.fromkeys(test.split("::")[0] for test in part)), plugin, "-x")
        ran += len(plugin.seconds)
        if plugin.failed:
            return "killed", plugin.failed[0], ran
        if code not in (0, 5):
            return "killed", "import", ran
    return "survived", "", ran


def install(mutant: Mutant) -> None:
    """From now on, importing the mutant's module gives the mutant."""
    path, tree = str(ROOT / mutant.file), mutant.source(ROOT)
    unchanged = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> Any:
        return compile(tree, path, "exec", dont_inherit=True) if self.path == path else unchanged(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


# Resuming ----------------------------------------------------------------------------------------------------------------------


class Kept:
    """Verdicts of earlier runs, a line each. One holds while the module is as it was, and, for a survivor, the tests as well."""

    def __init__(self, file: Path, suite_digest: str):
        self.file, self.suite = file, suite_digest
        self.found: dict[tuple[str, str], Any] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            entry = json.loads(line)
            self.found[entry["mutant"]["name"], entry["module"]] = entry

    def get(self, mutant: Mutant) -> Verdict | None:
        entry = self.found.get((mutant.name, digest(ROOT / mutant.file)))
        if entry is None or (entry["state"] != "killed" and entry["suite"] != self.suite):
            return None
        return Verdict(mutant, entry["state"], entry["by"], entry["tests"], entry["ran"])

    def put(self, verdict: Verdict) -> None:
        module = digest(ROOT / verdict.mutant.file)
        entry = {**asdict(verdict), "module": module, "suite": self.suite}
        entry["mutant"]["name"] = verdict.mutant.name
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as out:
            out.write(json.dumps(entry) + "\n")
