"""A converted model does what the plain one does, for generated models, code around them, modes and hooks.

25 cases run with every change and 50 000 by ``make fuzz``. A case is its seed; a failure is told as the
smallest source that still fails, which can be pasted after ``from tests.convert.differential.ingredients import *``.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.convert.differential.grammar import TABLE, Block, Case, case, minimised
from tests.convert.differential.runner import Run, _is_refused, compared, differences

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
STEP = 25
"""Cases of one test: few, so that workers end together."""


@cache
def runs(seed: int) -> tuple[Run, Run]:
    """A case plain and converted."""
    return Run(case(seed)).execute(), Run(case(seed), converts=True).execute()


def failures(seeds: range, *, compiled: bool = False) -> str:
    """The first case that differs, as small as it gets, and the seeds of all; nothing where none does."""
    found = [
        seed for seed in seeds if differences(case(seed, compiled=compiled), None if compiled or seed >= STEP else runs(seed))
    ]
    return f"seeds {found}\n{told(case(found[0], compiled=compiled))}" if found else ""


def told(found: Case) -> str:
    """A case and what differs in it, without what the first difference does not need."""
    kind = _kind(found)
    least = minimised(found, lambda each: _kind(each) == kind)
    return "\n".join((f"# seed {least.seed}, recipe {least.recipe}", least.text, *differences(least)))


def _kind(found: Case) -> str:
    """What the first difference is of."""
    first = next(iter(differences(found)), "")
    return " ".join(first.partition(": ")[2].split()[:2])


def test_25_cases() -> None:
    assert failures(range(STEP)) == ""


def test_a_compiled_case() -> None:
    assert failures(range(1), compiled=True) == ""


@pytest.mark.slow
@pytest.mark.parametrize("start", range(STEP, 50_000, STEP))
def test_50000_cases(start: int) -> None:
    assert failures(range(start, start + STEP)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 201, 10))
def test_200_compiled_cases(start: int) -> None:
    assert failures(range(start, start + 10), compiled=True) == ""


def test_cases_have_what_they_promise() -> None:
    """Among 500: every alternative of the grammar. Among 25: most calls return, and most models are converted."""
    texts = "\n".join(case(seed).text for seed in range(500))
    missing = [
        each
        for name in ("norm", "act", "function", "linear", "condition", "touch", "mixed", "write")
        for each in TABLE[name]
        if "<" not in each and each not in texts
    ]
    assert missing == []
    counts: Counter[str] = Counter()
    for seed in range(STEP):
        run, converted = runs(seed)
        counts["calls"] += run.calls
        counts["raised"] += sum(name.endswith("raises") for name, _ in run.seen)
        counts["broken"] += any(name == "the script" for name, _ in run.seen)
        counts["left alone"] += converted.left is not None
    assert counts["raised"] < counts["calls"] / 6
    assert counts["left alone"] < 8
    assert counts["broken"] < 2


def test_a_refused_call_hides_no_other_difference() -> None:
    """Of a call that a checkpoint refuses the result is compared, and so are other calls, and the case with other checkpoints."""
    names = ["result: values differ", "gradient of x: None in place of"]
    assert [_is_refused(f"call 2 (plain): {each}", [2]) for each in names] == [False, True]
    assert not any(_is_refused(f"call 3 (plain): {each}", [2]) for each in names)
    found = of_body("h = checkpoint(self.l, x, use_reentrant=True)").without_reentrant()
    assert "h = checkpoint(self.l, x, use_reentrant=False)" in found.text


def of_body(body: str) -> Case:
    block = Block("Model", "x", (("self.l = nn.Linear(16, 16)", body),), "return h")
    return Case(0, "identity", "float32", (block,), ("call('plain', made(randn(2, 5, 16)))",))


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("h = self.l(x) * (1 + 1e-4)", "result: values differ"),
        ("h = self.l(x).double()", "result: torch.float64 (2, 5, 16) in place of torch.float32"),
        ("h = self.l(x),", "result: "),
        ("h = self.l(x).detach()", "result 0 wants a gradient"),
        ("h = self.l(x) + 0.01 * (x - x.detach())", "gradient of argument 0: values differ"),
        ("h = F.linear(x, self.l.weight, self.l.bias.detach())", "gradient of l.bias: None in place of"),
        ("x.add_(0); h = self.l(x)", "argument 0 written"),
        ("h = self.l(x); torch.rand(1)", "random state"),
        ("stop(True); h = self.l(x)", "raises: only converted: Stop("),
    ],
)
def test_a_difference_is_seen(body: str, seen: str) -> None:
    """Of each kind, between two models; a model differs in nothing from itself."""
    first, second = of_body("h = self.l(x)"), of_body(body)
    plain, same, other = (Run(each).execute() for each in (first, first, second))
    assert compared(first, plain, same) == []
    assert any(seen in each for each in compared(first, plain, other)), compared(first, plain, other)
