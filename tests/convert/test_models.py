"""Tiny models of transformers, converted by a recipe that changes nothing, are what they were; some with every change, all with
-m slow. The table of docs/architectures.md says what became of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse.errors import ConversionError
from tests.convert.differential.ingredients import noted
from tests.convert.differential.runner import EXACT, VALUES, bf16, differs
from tests.turns import in_turn

pytest.importorskip("transformers", reason="of the extra `test`")

from docs import architectures, tables
from tests.convert.tiny import MODELS, arguments, tiny

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
CALLS = {"train": nullcontext, "train again": nullcontext, "eval": nullcontext, "eval again": nullcontext, "autocast": bf16}
CLOSE = {**dict.fromkeys(CALLS, 1e-4), "autocast": 0.2}
PAGE = architectures.DOCUMENT.read_text(encoding="utf-8")


def seen(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """What can be seen of calls, each with the name of the call."""
    given = arguments(model)
    for call, around in CALLS.items():
        model.train("eval" not in call).zero_grad()
        torch.manual_seed(2)
        with around():
            result = model(**given)
        yield call, "results", noted([each for each in tree_leaves(result.to_tuple()) if isinstance(each, torch.Tensor)])
        result.loss.backward()
        for name, parameter in model.named_parameters():
            yield call, f"gradient of {name}", None if parameter.grad is None else parameter.grad.clone()
        yield call, "random state", torch.get_rng_state()


@pytest.mark.parametrize("name", in_turn(MODELS, of=16))
def test_a_model_is_what_it_was(name: str) -> None:
    """Of gradients under autocast the dtypes alone are compared: a router may send a token elsewhere for a bit."""
    model = tiny(name)
    plain = [*seen(model)]
    try:
        report = opfuse.fuse_(model, EXACT)
    except ConversionError:
        return
    found = []
    for (call, what, value), (_, _, other) in zip(plain, seen(model), strict=True):
        largest = max(map(partial(_largest, call), plain))
        why = differs(value, other, CLOSE[call], lambda largest=largest: largest)
        if why and not (call == "autocast" and "gradient" in what and why.startswith(VALUES)):
            found.append(f"{call}: {what}: {why}")
    assert found == []
    assert tables.table([], [architectures.row(name, report)]).splitlines()[-1] in PAGE, "run `python -m docs.architectures`"


def _largest(call: str, seen: tuple[str, str, Any]) -> float:
    leaves = [each for each in tree_leaves(seen[2]) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return max((each.double().abs().max().item() for each in leaves if seen[0] == call and each.numel()), default=0.0)


def test_the_page_has_every_model() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[2:] == MODELS
    assert len(MODELS) >= 90
