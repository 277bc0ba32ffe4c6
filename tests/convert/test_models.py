"""Tiny models of transformers, converted by a recipe that changes nothing, are what they were; some with every change, all with
-m slow. The table of docs/architectures.md says what became of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tests.convert.differential.runner import VALUES, bf16, differs, size
from tests.convert.test_fuse import EXACT
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
        try:
            with around():
                result = model(**given)
            yield call, "results", noted([each for each in tree_leaves(result.to_tuple()) if isinstance(each, torch.Tensor)])
            result.loss.backward()
        except Exception as error:
            yield call, "raises", type(error).__name__
        for name, parameter in model.named_parameters():
            yield call, f"gradient of {name}", noted(parameter.grad)
        yield call, "random state", torch.get_rng_state()


@pytest.mark.parametrize("name", in_turn(MODELS, of=96))
def test_a_model_is_what_it_was(name: str) -> None:
    """Of gradients under autocast the dtypes alone are compared: a router may send a token elsewhere for a bit."""
    plain, model = [*seen(tiny(name))], tiny(name)
    try:
        row, others = architectures.row(name, opfuse.fuse_(model, EXACT)), [*seen(model)]
    except ConversionError as error:
        row, others = architectures.left(name, error), plain
    assert [each[:2] for each in others] == [each[:2] for each in plain]
    found = []
    for (call, what, value), (_, _, other) in zip(plain, others):
        why = differs(value, other, CLOSE[call], partial(_largest, plain, call))
        if why and not (call == "autocast" and "gradient" in what and why.startswith(VALUES)):
            found.append(f"{call}: {what}: {why}")
    assert found == []
    assert tables.table([], [row]).splitlines()[-1] in PAGE, "run `python -m docs.architectures`"


def _largest(seen: Sequence[tuple[str, str, Any]], call: str) -> float:
    """Of all numbers of a call."""
    return max(size(value) for at, _, value in seen if at == call)


def test_the_page_has_every_model() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[2:] == MODELS
    assert len(MODELS) >= 90
