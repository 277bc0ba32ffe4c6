"""Runs the script of a case twice, plain and converted, and compares everything that somebody outside can see."""

from __future__ import annotations

import copy
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

import opfuse
from opfuse.errors import ConversionError
from opfuse.recipes import CustomRecipe
from opfuse.tensors.quantizers import IdentityQuantizer
from tests.convert.differential import ingredients
from tests.convert.differential.grammar import Case

RECIPES: dict[str, Callable[[CustomRecipe], tuple[object, Callable[[], AbstractContextManager[Any]]]]] = {
    "none": lambda exact: (None, nullcontext),
    "identity": lambda exact: (exact, nullcontext),
    "region": lambda exact: (None, partial(opfuse.autocast, recipe=exact)),
}
"""What ``fuse_`` is given, and what is around calls, by a recipe that changes nothing."""
bf16 = partial(torch.autocast, "cpu", torch.bfloat16)
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], ...]] = {
    "plain": (),
    "eval": (),
    "no_grad": (torch.no_grad,),
    "eval_no_grad": (torch.no_grad,),
    "inference": (torch.inference_mode,),
    "autocast": (bf16,),
    "autocast_no_grad": (bf16, torch.no_grad),
}
CLOSE = {"float32": 2e-5, "float64": 2e-6}
"""By the dtype of the model, of the largest value of a tensor and a tenth of that of its call; some norms compute in fp32."""
NARROW = 0.1
"""The norm of a difference, of the norm of the value, where some numbers have the bits of bf16."""
ROUNDING, SHAKES = {"float64": 2.0**-50, "float32": 2.0**-22, "bfloat16": 2.0**-7}, 256
VALUES = "values differ"


class Run:
    """One run of a case: ``seen`` is what can be seen of it, as pairs of a name and a value, ``refused`` the calls of REFUSED.

    converts: whether ``fuse`` does something. checkpoints: whether ``checkpoint`` does. written: the calls with a
    backward pass that the converted model refuses because of a write. shaken: the relative change of all numbers that a call
    begins with, at random by ``draw``.
    """

    def __init__(
        self, case: Case, *, converts: bool = False, checkpoints: bool = True, shaken: float = 0.0, draw: int = 0
    ) -> None:
        self.case, self.converts, self.shaken, self.draw = case, converts, shaken, torch.Generator().manual_seed(draw)
        self.checkpoints = checkpoints
        self.seen: list[tuple[str, Any]] = []
        self.log = ingredients.Log()
        # One for all cases would be asked for the roles of all: a custom recipe asks again for them whenever a region begins.
        self.recipe, self.around = RECIPES[case.recipe](CustomRecipe(qfactory=lambda role: IdentityQuantizer()))
        self.left: str | None = None
        self.report: opfuse.convert.report.Report | None = None
        self.calls = 0
        self.compiles = "compile(" in case.text
        self.refused: list[int] = []
        self.written: list[int] = []
        # The text alone: an exception keeps frames, one of them that of a checkpoint whose forward raised, and torch 2.11 removes
        # the hooks of that checkpoint when its frame goes. They would pack what later runs save.
        self.error = ""

    def execute(self) -> Run:
        name = f"<case {self.case.seed}>"
        linecache.cache[name] = (len(self.case.text), None, self.case.text.splitlines(keepends=True), name)
        if self.compiles:
            torch._dynamo.reset()
        seeded(self.case.seed)
        draw = torch.Generator().manual_seed(self.case.seed)
        sys.modules["case"] = module = ModuleType("case")  # dynamo imports what functions say that they are of
        self.space = vars(module)
        self.space |= {each: getattr(ingredients, each) for each in ingredients.__all__}
        self.space |= {
            "randn": lambda *shape: torch.randn(shape, generator=draw).to(self.space["dtype"]),
            "fuse": self.fuse,
            "unfuse": self.unfuse,
            "call": self.call,
            "log": self.log,
            "copied": copy.deepcopy,
        }
        if not self.checkpoints:
            self.space["checkpoint"] = lambda function, *args, use_reentrant: function(*args)
        # Hooks that are registered once code is compiled are noticed by chance otherwise: if something else compiles it again.
        guarded = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False) if self.compiles else nullcontext()
        try:
            with guarded:
                exec(compile(self.case.text, name, "exec"), self.space)
        except Exception as error:
            self.seen.append(("the script", f"raises {type(error).__name__}"))
            self.error = f"{error!r:.300}"
        finally:
            self.log.close()
        return self

    def fuse(self, model: nn.Module, **how: Any) -> None:
        if not self.converts:
            return
        try:
            self.report = opfuse.fuse_(model, self.recipe, **how)
        except ConversionError as error:
            self.left = str(error)

    def unfuse(self, model: nn.Module) -> None:
        """Undo ``fuse``. Refused where the script has replaced what was converted, or its forward."""
        if self.report is not None:
            with suppress(ConversionError):
                opfuse.unfuse_(model)

    def shake(self, values: Iterable[torch.Tensor]) -> None:
        for each in values:
            noise = torch.randn(each.shape, generator=self.draw, dtype=torch.float64)
            each.data.mul_((1 + self.shaken * noise).to(each.dtype))

    def call(self, mode: str, *args: Any, **kwargs: Any) -> None:
        """Call the model, and keep what can be seen of that, under names that begin with the number of the call."""
        model, (flat, _) = self.space["model"], tree_flatten((args, kwargs))
        self.calls += 1
        at = f"call {self.calls} ({mode})"
        given = {f"argument {i}": each for i, each in enumerate(flat) if isinstance(each, torch.Tensor)}
        if self.shaken:
            self.shake([*given.values(), *(model.parameters() if self.calls == 1 else ())])
        before = {name: each._version for name, each in given.items()}
        model.zero_grad()
        seeded(self.calls)
        was = [module.training for module in model.modules()]
        if mode.startswith("eval"):
            model.eval()
        found: list[tuple[str, Any]] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(self.around())
                for each in MODES[mode]:
                    stack.enter_context(each())
                result = model(*args, **kwargs)
            found += [("result", ingredients.noted(result)), *_facts(result, given)]
            backward(result)
        except Exception as error:
            found.append(("raises", type(error).__name__ if isinstance(error, ingredients.Stop) else True))
            self.error = f"{error!r:.300}"
            self.refused += [self.calls] if any(text in str(error) for text in REFUSED[self.converts]) else []
            self.written += [self.calls] if WRITTEN in str(error) else []
            if self.compiles:  # what code does before an error that dynamo meets is lost, and graphs may end elsewhere
                self.log.clear()
        for module, training in zip(model.modules(), was):
            module.training = training
        found += [(f"{name} afterwards", each.detach().clone()) for name, each in given.items()]
        found += [(f"{name} written", each._version != before[name]) for name, each in given.items()]
        found += [(f"gradient of {name}", each.grad) for name, each in given.items() if each.is_leaf or each.retains_grad]
        found += [(f"gradient of {name}", None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
        found += [(f"buffer {name}", buffer.clone()) for name, buffer in model.named_buffers()]
        found += [("random state", torch.get_rng_state()), ("hooks", [each[0] for each in self.log])]
        found += [(f"hook {i}, {each[0]}", each[1:]) for i, each in enumerate(self.log)]
        self.log.clear()
        self.seen += [(f"{at}: {name}", value) for name, value in found]


def seeded(seed: int) -> None:
    """Begin the random numbers of the host anew; ``torch.manual_seed`` would also note where it was called, for each device."""
    torch.default_generator.manual_seed(seed)


def _facts(result: Any, given: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Of the tensors of a result, what no value says."""
    memory = {each.untyped_storage().data_ptr() for each in given.values() if each.numel()}
    for i, y in enumerate(each for each in tree_leaves(result) if isinstance(each, torch.Tensor)):
        yield f"result {i} wants a gradient", y.requires_grad
        yield f"result {i} is an argument", any(y is each for each in given.values())
        yield f"result {i} shares memory with an argument", y.numel() > 0 and y.untyped_storage().data_ptr() in memory


def backward(result: Any) -> None:
    """Gradients of a sum of all results, each value with a weight of its own."""
    terms = [
        (y.double() * torch.linspace(-1, 1.5, y.numel(), dtype=torch.float64).view(y.shape).cos()).sum()
        for y in tree_leaves(result)
        if isinstance(y, torch.Tensor) and y.requires_grad and not y.is_inference()
    ]
    if terms:
        torch.stack(terms).sum().backward()


REFUSED = {
    False: ("is a view and is being", "is a view and its base or another", "has been modified by an inplace operation"),
    True: (
        "recomputation by a checkpoint",
        "another one, and a function around the module's forward",
    ),
}
"""Errors of one run alone, by whether it is the converted one (docs/fuse.md). In plain torch refuses a write to a result that is
a view of a checkpoint's, and the backward pass through a result that was written to and that it had saved; a converted module's
result is no view, and other tensors are saved. Converted, a checkpoint refuses a function that calls other modules when it runs
again, and a module whose class got another forward refuses calls through a function that was put around its own."""

WRITTEN = "wants saved tensors as the forward pass left them"
"""An error of the converted run, which torch raises as well, but not in a non-reentrant checkpoint: that saves what its function
saves when it runs again, and torch compares no versions of it. It goes on with gradients of what was written (docs/fuse.md)."""


def differences(case: Case, runs: tuple[Run, Run] | None = None) -> list[str]:
    """What differs between ``case`` plain and converted, each with its name first. runs: those of both, made before.

    Of a call that one of them refuses, only what was there before; that counts for the case with other checkpoints, too.
    """
    plain, other = runs or (Run(case).execute(), Run(case, converts=True).execute())
    found = compared(case, plain, other)
    refused = {*plain.refused, *other.refused}
    if written := {*other.written} - refused:  # right where torch refuses the same call without a checkpoint
        refused |= written & {*Run(case, checkpoints=False).execute().refused}
    if not refused:
        return found
    found = [each for each in found if not _is_refused(each, sorted(refused))]
    accepted = case.without_reentrant()
    return found + [f"with use_reentrant=False, {each}" for each in (differences(accepted) if accepted != case else [])]


def _is_refused(difference: str, refused: list[int]) -> bool:
    """Whether a difference follows from a backward pass that ended; buffers that it would have written differ from then on."""
    at, _, what = difference.partition(": ")
    call = int(at.split()[1]) if at.startswith("call") else 0
    ended = call in refused and (not what.startswith("result") or "only converted" in what)
    return ended or (call > refused[0] and what.startswith("buffer"))


def compared(case: Case, plain: Run, other: Run) -> list[str]:
    """What differs between two runs of a case: values by more than 4 times what rounding of what they are made of does."""
    exact, narrow = case.recipe == "none" or other.left is not None, "bfloat16" in case.text or "autocast" in case.text
    close = 0.0 if exact else NARROW if narrow else CLOSE[case.dtype]
    names = [[name for name, _ in run.seen] for run in (plain, other)]
    lost, more = ([name for name in names[i] if name not in names[1 - i]] for i in (0, 1))
    found = [f"{name}: only converted: {other.error}" for name in more] or [f"{name}: only plain" for name in lost]
    values, shaken = dict(other.seen), _Shaken(case, ROUNDING["bfloat16" if narrow else case.dtype])
    largest = cache(partial(_largest, plain.seen))
    for name, value in plain.seen:
        if name not in values or not (why := differs(value, values[name], close, partial(largest, _group(name)))):
            continue
        if why.startswith(VALUES) and not exact:
            distance = _distance(value, values[name])
            if any(distance <= 4 * _distance(value, each.get(name)) for each in shaken):
                continue
        found.append(f"{name}: {why}")
    return sorted(found, key=lambda each: int(each.split()[1]) if each.startswith("call") else 0)


class _Shaken:
    """What is seen of runs of a case with numbers that are rounded otherwise, made as they are asked for."""

    def __init__(self, case: Case, rounding: float) -> None:
        self.case, self.rounding = case, rounding
        self.seen: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for draw in range(SHAKES):
            if draw == len(self.seen):
                self.seen.append(dict(Run(self.case, shaken=self.rounding, draw=draw).execute().seen))
            yield self.seen[draw]


def _distance(value: Any, other: Any) -> float:
    pairs = [pair for pair in zip(tree_leaves(value), tree_leaves(other)) if isinstance(pair[0], torch.Tensor)]
    return sum((one.double() - two.double()).nan_to_num(0, 0, 0).norm().item() for one, two in pairs if one.shape == two.shape)


def _group(name: str) -> str:
    """How the names of all gradients of a call begin, or of all its results."""
    at, _, what = name.partition(": ")
    return f"{at}: {what.partition(' ')[0]}"


def _largest(seen: list[tuple[str, Any]], start: str) -> float:
    """Of the values whose names begin so."""
    return max((size(value) for name, value in seen if name.startswith(start)), default=0.0)


def size(value: Any) -> float:
    """The largest finite number in ``value``."""
    known = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel()]
    return max((each.double().nan_to_num(0, 0, 0).abs().max().item() for each in known), default=0.0)


def differs(value: Any, other: Any, close: float, largest: Callable[[], float]) -> str:
    """How ``other`` differs from ``value`` by more than ``close``; nothing where it does not. largest: of what it is part of."""
    (flat, kind), (others, other_kind) = tree_flatten(value), tree_flatten(other)
    if kind != other_kind:
        return f"{other_kind} in place of {kind}"[:200]
    return next((why for one, two in zip(flat, others) if (why := _differs(one, two, close, largest))), "")


def _differs(value: Any, other: Any, close: float, largest: Callable[[], float]) -> str:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if type(value) is type(other) and value == other else f"{told(other)} in place of {told(value)}"
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        return f"{told(other)} in place of {told(value)}"
    if torch.equal(value, other):
        return ""
    if not torch.equal(value.isfinite(), other.isfinite()):
        return f"{int((~other.isfinite()).sum())} values are not finite in place of {int((~value.isfinite()).sum())}"
    one, two = (each.double().nan_to_num(0, 0, 0) for each in (value, other))
    if torch.equal(one, two):
        return ""
    if close == NARROW:
        same = bool((one - two).norm() <= NARROW * one.norm() + 1e-3 * largest())
    else:
        same = bool(((one - two).abs() <= close * (size(value) + 0.1 * largest())).all())
    return "" if same else f"{VALUES} by {size(one - two):.3g} of {size(one):.3g}"


def told(value: Any) -> str:
    """A tensor by its dtype and shape, something else in short."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
