"""A trial of a fusion rule: pipelines of the ops that its pattern matches, with the rule and without it, compared bit by bit.

Pipelines follow from the pattern. All places are filled in the first one; in each other one a place is empty, has one node more,
or has another op that one of its words means. Hyper-parameters are such that the guards pass. Each pipeline runs alone and
between two products, forward and backward, under every recipe; where a call meets the rule, the same call without it tells what
is right. What the ops themselves refuse, as a shape that no recipe casts, is no fault of the rule.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch

from opfuse import ops
from opfuse.compiler.cover import FUSED
from opfuse.compiler.graph import BACKWARD, CAST_WORDS, QUANTIZE_GROUPS
from opfuse.compiler.patterns import printed
from opfuse.compiler.plan import Plan
from opfuse.compiler.registry import Registration, RuleSet, default_rules, use_rules
from opfuse.compiler.rules import JOINT, Fusion, Guard, is_
from opfuse.compiler.vocabulary import classes_named, declared_traits
from opfuse.config.operations import OPS
from opfuse.core.cast import GRADIENT
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import PLACEMENT, argument
from opfuse.domains import BOOLEAN
from opfuse.errors import FusionError, OpfuseError, OpfuseWarning, describe, listed, nearest, number_of
from opfuse.events import PlanUsed, TensorSaved, collected, subscribed
from opfuse.formats import dtype_name
from opfuse.recipes import RECIPES, Recipe
from opfuse.recipes.autocast import under
from opfuse.recipes.policy import OVERRIDES
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

EQUAL, DIFFERENT, RAISED, IDLE = "equal", "different", "raised", "not fired"
"""What became of a rule under a recipe."""

NO_RECIPE = "none"

_FIELDS: Mapping[str, Mapping[str, Any]] = {"custom": {"qfactory": "fp8_row_scaled"}}
"""What a kind of recipe needs to be told."""

_FIELDS_IN_FP32: Mapping[str, Mapping[str, Any]] = {"nvfp4": {"disable_rht": True}}
"""What a kind of recipe needs for tensors in fp32: the rotation of NVFP4 is for bf16 only."""

DTYPES = (torch.bfloat16, torch.float32)
WIDTH, GROUPS = 64, 4
LEADING = ((64,), (33,), (2, 16), (0,))
"""Shapes of an input but for its columns: whole blocks, a tail, two dimensions, no row."""


class Asked(NamedTuple):
    """Which gradients a call asks for. inputs: those of its inputs. extras: also through extra outputs. grad: any at all."""

    text: str = ""
    inputs: bool = True
    extras: bool = True
    grad: bool = True


ALL = Asked()
FEWER = (
    Asked(", no gradient of the input", inputs=False),
    Asked(", no gradient from extra outputs", extras=False),
    Asked(", under torch.no_grad", grad=False),
)


class FirstDifference(NamedTuple):
    """The first tensor that is not as without the rule. index: of its first wrong element. others: more wrong tensors."""

    tensor: str
    index: tuple[int, ...]
    wanted: str
    got: str
    differing: int
    elements: int
    others: tuple[str, ...]

    def __str__(self) -> str:
        where = f" at {self.index}" if self.elements else ""
        count = f"; {self.differing} of {self.elements} elements differ" if self.elements else ""
        others = f"; {listed(self.others)} {'differs' if len(self.others) == 1 else 'differ'} too" if self.others else ""
        return f"{self.tensor}{where} wants {self.wanted}, got {self.got}{count}{others}"


@dataclass(frozen=True)
class RuleUnderRecipe:
    """What became of a rule under one recipe.

    status: "equal", "different", "raised" or "not fired". fired: in how many calls it did. reasons: why it did not in others.
    call: the one that went wrong. error: what it raised, and where.
    """

    recipe: str
    backward_override: str | None
    status: str
    fired: int
    reasons: tuple[str, ...] = ()
    call: str = ""
    difference: FirstDifference | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a rule need not fire under every recipe."""
        return self.status in (EQUAL, IDLE)

    @property
    def name(self) -> str:
        """The recipe, and its override."""
        return f"{self.recipe}, {self.backward_override}" if self.backward_override else self.recipe

    @property
    def summary(self) -> str:
        """In one line: what became of the rule, and why it did not fire."""
        if self.status == EQUAL:
            return f"equal in {number_of(self.fired, 'call')}"
        if self.status == IDLE:
            return f"not fired: {self.reasons[0] if self.reasons else 'its pattern matches nothing'}"
        return f"{self.status}: {self.difference or self.error}"


@dataclass(frozen=True)
class RuleReport:
    """What became of a rule under every recipe. pipelines: how many were tried. left_out: ops that could not be, and why."""

    rule: str
    pattern: str
    direction: str
    source: str
    device: str
    pipelines: int
    results: tuple[RuleUnderRecipe, ...]
    left_out: tuple[str, ...] = ()

    @property
    def fired(self) -> bool:
        """Whether it fired under some recipe."""
        return any(result.fired for result in self.results)

    @property
    def ok(self) -> bool:
        """Whether it fired, and was right wherever it did."""
        return self.fired and all(result.ok for result in self.results)

    @property
    def idle(self) -> str:
        """Why it never fired: an error's text; empty if it did."""
        if self.fired or not all(result.ok for result in self.results):
            return ""
        reasons = Counter(reason for result in self.results for reason in result.reasons[:1])
        got = "; ".join(f"{reason} (under {number_of(count, 'recipe')})" for reason, count in reasons.most_common())
        cure = "mend the pattern or the guards, or try the rule in a pipeline of yours: opfuse.explain says why it does not fire"
        where = f"fusion {self.rule!r}"
        return describe(where, wanted="a call in which it fires", got=f"none: {got or 'its pattern matches nothing'}", cure=cure)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        results = [_plain_result(result) for result in self.results]
        return {**asdict(self), "ok": self.ok, "fired": self.fired, "idle": self.idle, "results": results}


def _plain_result(result: RuleUnderRecipe) -> dict[str, Any]:
    found = result.difference
    return {**vars(result), "reasons": [*result.reasons], "difference": None if found is None else found._asdict()}


# -- which rule ------------------------------------------------------------------------------------------------------------------


def rule_at(path: str) -> Fusion:
    """The rule that ``module:NAME`` names: what ``fusion`` returned, or ``register_fusion``. FusionError if there is none."""
    module_name, _, name = path.partition(":")
    where = f"rule {path!r}"
    if not module_name or not all(name.split(".")):
        cure = "write the name of a module and, after a colon, that of a rule in it"
        raise FusionError(describe(where, wanted="MODULE:RULE", got=repr(path), cure=cure))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does
        cure = "mend the module, or run from the folder that has it"
        got = f"{type(error).__name__}: {error}"
        raise FusionError(describe(where, wanted="a module that can be imported", got=got, cure=cure)) from error
    for step in name.split("."):
        if not hasattr(found, step):
            known = [name for name, value in vars(found).items() if isinstance(value, (Fusion, Registration))]
            got, cure = f"none{nearest(step, known)}", f"name one of {', '.join(known)}" if known else "define a rule in it"
            raise FusionError(describe(where, wanted=f"{step!r} in {module_name}", got=got, cure=cure))
        found = getattr(found, step)
    if isinstance(found, Registration):
        known_rules = {rule.name: rule for rule in default_rules().rules}
        found = known_rules.get(found.name, found)
    if not isinstance(found, Fusion):
        cure = "name what fusion() or register_fusion() returned; a fusion function has no pattern to make pipelines of"
        raise FusionError(describe(where, wanted="a fusion rule", got=repr(found), cure=cure))
    return found


# -- which pipelines -------------------------------------------------------------------------------------------------------------


class PlacedOp(NamedTuple):
    """An op at a place of the pattern, or beside it. cls: None for a cast. guards: those on its fields."""

    cls: type[BasicOperation] | None
    guards: tuple[Guard, ...] = ()
    groups: bool = False


class TrialCall(NamedTuple):
    """One call. row: the ops of the pattern. between: whether products stand before and behind them."""

    row: tuple[PlacedOp, ...]
    between: bool
    dtype: torch.dtype
    leading: tuple[int, ...]
    asked: Asked = ALL


class MadePipeline(NamedTuple):
    """A pipeline, and what a call of it takes."""

    model: ops.Sequential
    x: torch.Tensor
    extras: tuple[torch.Tensor, ...]
    text: str


def _classes(word: str) -> list[type[BasicOperation]]:
    """The ops that a word of a pattern means: of its kind, or built-in ones of that trait."""
    known = [cls for cls in OPS.values() if issubclass(cls, BasicOperation)]
    return classes_named(word) or [cls for cls in known if word in declared_traits(cls)]


def _rows(rule: Fusion) -> Iterator[tuple[PlacedOp, ...]]:
    """The ops of each pipeline; the first has something at every place."""
    options = [_options(rule, place) for place in range(len(rule.pattern))]
    counts = [max(term.low, 1) for term in rule.pattern]
    yield _row(options, counts)
    for i, term in enumerate(rule.pattern):
        if term.low < counts[i]:
            yield _row(options, [*counts[:i], term.low, *counts[i + 1 :]])
        if term.high is None or term.high > counts[i]:
            yield _row(options, [*counts[:i], counts[i] + 1, *counts[i + 1 :]])
        for other in options[i][1:]:
            yield _row([*options[:i], [other], *options[i + 1 :]], counts)


def _row(options: Sequence[Sequence[PlacedOp]], counts: Sequence[int]) -> tuple[PlacedOp, ...]:
    return tuple(chain.from_iterable(choices[:1] * count for choices, count in zip(options, counts)))


def _options(rule: Fusion, place: int) -> list[PlacedOp]:
    """What can stand at a place, each once."""
    term = rule.pattern[place]
    guards = tuple(guard for guard in rule.when if guard.reads.rpartition(".")[0] == term.name)
    found: list[PlacedOp] = []
    for word in term.words:
        if word in (*CAST_WORDS, QUANTIZE_GROUPS):
            found.append(PlacedOp(None, groups=word == QUANTIZE_GROUPS))
        found += [PlacedOp(cls, guards, "num_groups" in _parameters(cls)) for cls in _classes(word) if cls is not ops.Quantize]
    return list({(each.cls, each.groups): each for each in found}.values())


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What the constructor takes, but for devices and the like."""
    _, *found = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    named = (each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return {each.name: each for each in named if each.name not in PLACEMENT}


_PRODUCT = PlacedOp(ops.BasicLinear)
_GROUPED = PlacedOp(ops.GroupedLinear, groups=True)


def _with_neighbours(call: TrialCall, direction: str) -> list[PlacedOp]:
    """The ops of a call: each cast becomes that of the product beside it, or an explicit one if there is none."""
    row, grouped = [*call.row], any(op.groups for op in call.row)
    neighbour = _GROUPED if grouped else _PRODUCT
    if row[0].cls is None and direction == BACKWARD or call.between and not (row[0].cls is ops.TokenDispatch):
        row.insert(0, neighbour)
    if row[-1].cls is None and direction != BACKWARD or call.between:
        row.append(neighbour)
    made: list[PlacedOp] = []
    for i, op in enumerate(row):
        if op.cls is not None:
            made.append(op)
            continue
        beside, role = (row[i - 1], GRADIENT) if direction == BACKWARD else (row[min(i + 1, len(row) - 1)], "input")
        if beside.cls is None or role not in beside.cls.roles and not beside.groups:
            backward = direction == BACKWARD
            fixed = {"forward": not backward, "backward": backward}
            made.append(PlacedOp(ops.Quantize, tuple(is_(f"quantize.{name}", value) for name, value in fixed.items())))
    return made


_COLUMNS = ("in_features", "features", "normalized_shape", "size")
"""Arguments that say how many columns an op takes."""

_ARGUMENTS: Mapping[str, Any] = {"scale": 0.3, "p": 0.25, "num_groups": GROUPS, "pad_splits": True, "top_k": 2}
"""What other arguments are, where guards do not want another value: a scale that rounds, groups that casts take."""

_BY_TYPE: Mapping[Any, Any] = {int: WIDTH, float: 0.3, bool: False, "int": WIDTH, "float": 0.3, "bool": False}

_CHANNELS: Mapping[str, str] = {"grouped_linear": "splits", "token_combine": "places"}
"""The channel of a dispatch that an op reads; activations in groups read the probabilities."""


class _UnbuiltError(Exception):
    """An op cannot be built so that its guards pass; the text says why."""


def _arguments(op: PlacedOp, columns: int, wide: int) -> dict[str, Any]:
    """The arguments of an op on so many columns, which makes ``wide`` if it can choose."""
    cls, chosen = op.cls, {}
    assert_cls = cls if cls is not None else BasicOperation
    for name, parameter in _parameters(assert_cls).items():
        guards = [guard for guard in op.guards if argument(guard.reads.rpartition(".")[2]) == name]
        if name in _COLUMNS:
            candidates = [columns]
        elif name == "out_features":
            candidates = [wide, *_wanted(guards)]
        elif name == "shape":
            candidates = [(-1, columns)]
        elif name in _ARGUMENTS:
            candidates = [_ARGUMENTS[name], *_wanted(guards)]
        else:
            usual = _BY_TYPE.get(parameter.annotation) if parameter.default is parameter.empty else parameter.default
            candidates = [*([] if usual is None and parameter.default is parameter.empty else [usual]), *_wanted(guards)]
        passing = [value for value in candidates if all(guard.ok(value) for guard in guards)]
        if not passing:
            asked = "; ".join(f"{guard.reads} wants {guard.wanted_text}" for guard in guards)
            raise _UnbuiltError(f"no value is known for the argument {name!r} of {assert_cls.__name__}{asked and f': {asked}'}")
        chosen[name] = passing[0]
    return chosen


def _wanted(guards: Sequence[Guard]) -> Iterator[Any]:
    """Values that may pass the guards: those that they name, and a number of columns beyond all that they do."""
    numbers = [1]
    for guard in guards:
        for want in guard.want if guard.test == "one_of" else (guard.want,):
            yield want
            if want in BOOLEAN:
                yield not want
            if type(want) is int:
                yield from (want + 1, want - 1)
                numbers.append(want if guard.test == "multiple_of" else 1)
    yield math.lcm(*numbers) * -(-WIDTH // math.lcm(*numbers))
    yield math.lcm(*numbers)


def _widths(rule: Fusion) -> list[int]:
    """Numbers of columns that the input may have: the usual one, then those that guards want."""
    sizes = [guard for guard in rule.when if guard.reads.rpartition(".")[2] in (*_COLUMNS, "out_features")]
    by_name = [[guard for guard in sizes if guard.reads == name] for name in dict.fromkeys(guard.reads for guard in sizes)]
    found = (value for guards in by_name for value in _wanted(guards) if type(value) is int and value > 0)
    return [*dict.fromkeys((WIDTH, *found))]


def _made(call: TrialCall, rule: Fusion, device: torch.device, columns: int) -> MadePipeline:
    """The pipeline of a call. _UnbuiltError where guards or constructors refuse; other errors where ops refuse the input."""
    placed = _with_neighbours(call, rule.direction)
    grouped = any(op.groups for op in placed)
    if grouped and placed[0].cls is not ops.TokenDispatch:
        placed.insert(0, PlacedOp(ops.TokenDispatch))
    if grouped:
        placed.append(PlacedOp(ops.TokenCombine))
    x = value = _random((*call.leading, columns), call.dtype, device, seed=0)
    model, extras, channels = list[BasicOperation](), list[torch.Tensor](), dict[str, torch.Tensor]()
    for i, op in enumerate(placed):
        built = _built(op, value.shape[-1] if value.dim() else 1, call.dtype, device)
        kind = built.kind
        name = _CHANNELS.get(kind) or ("probabilities" if kind.startswith("scaled_") else None)
        read = name if grouped and name in channels else None
        outputs, given = _tried(built, value, [channels[read]] if read else None, seed=1 + i)
        value, *more = outputs
        if read:
            built.set_extra_input_channel(0, read)
        else:
            extras += given
        if grouped and kind == "token_dispatch":
            channels |= dict(zip(("splits", "probabilities", "places"), more))
        model.append(built)
    readers = {channel.name for op in model for channel in op.extra_input_channels}
    for op in model if grouped else ():
        for i, name in enumerate(channels if op.kind == "token_dispatch" else ()):
            if name in readers:
                op.set_extra_output_channel(i, name)
    text = " ".join(op.label for op in model)
    where = f"{text} on {dtype_name(call.dtype)} of shape {tuple(x.shape)}{call.asked.text}"
    return MadePipeline(ops.Sequential(*model), x, tuple(extras), where)


def _built(op: PlacedOp, columns: int, dtype: torch.dtype, device: torch.device) -> BasicOperation:
    """The op, with parameters that are neither all zero nor all one."""
    cls: Any = op.cls
    arguments = _arguments(op, columns, WIDTH)
    placement = {"device": device, "dtype": dtype}
    accepted = inspect.signature(cls.__init__).parameters
    try:
        built: BasicOperation = cls(**arguments, **{name: placement[name] for name in placement if name in accepted})
    except Exception as error:  # of the user's constructor, too
        raise _UnbuiltError(f"{cls.__name__} cannot be built: {error}") from error
    built.to(device, dtype)
    with torch.no_grad():
        for i, parameter in enumerate(built.parameters()):
            parameter.add_(0.25 * _random(tuple(parameter.shape), parameter.dtype, device, seed=11 + i))
    for guard in op.guards:
        field = guard.reads.rpartition(".")[2]
        if hasattr(built.spec, field) and not guard.ok(getattr(built.spec, field)):
            raise _UnbuiltError(f"{guard.reads} wants {guard.wanted_text}, got {getattr(built.spec, field)!r}")
    return built


def _tried(
    op: BasicOperation, x: torch.Tensor, given: list[torch.Tensor] | None, *, seed: int
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """The outputs of an op alone, and the extra inputs that it takes: as the input, or one number or half a row for each row."""
    shapes = (tuple(x.shape), tuple(x.shape[:-1]), (*x.shape[:-1], x.shape[-1] // 2))
    with torch.no_grad():
        for found in product(shapes, repeat=0 if given is not None else op.num_extra_inputs):
            made = [_random(shape, x.dtype, x.device, seed=100 * seed + i) for i, shape in enumerate(found)]
            try:
                result = op(x.clone(), *(each.clone() for each in given or made))
            except (OpfuseError, RuntimeError) as error:
                refusal: Exception = error
                continue
            outputs = result if isinstance(result, tuple) else (result,)
            return tuple(output.detach().clone() for output in outputs), made
    raise refusal


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int) -> torch.Tensor:
    """Normal values that depend on shape and seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device, dtype)


# -- calls -----------------------------------------------------------------------------------------------------------------------


class CallResult(NamedTuple):
    """Named tensors of a call, and the plans that ran. error: what it raised, in place of tensors."""

    tensors: Mapping[str, torch.Tensor | None]
    plans: Sequence[Plan]
    error: Exception | None = None


def _run(made: MadePipeline, recipe: Recipe | None, rules: RuleSet, asked: Asked) -> CallResult:
    """Training calls of a copy of the pipeline: two under delayed scaling, whose second one has a scale."""
    model, plans = copy.deepcopy(made.model), list[Plan]()
    tensors: dict[str, torch.Tensor | None] = {}
    try:
        for step in range(2 if recipe is not None and recipe.kind == "delayed" else 1):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(7 + step)
            with collected(PlanUsed) as used:
                try:
                    tensors = _step(model, made, recipe, rules, asked, 1 + step)
                finally:
                    plans += [event.plan for event in used]
    except Exception as error:  # of a rule, whatever it does
        return CallResult({}, plans, error)
    return CallResult(tensors, plans)


def _step(
    model: ops.Sequential, made: MadePipeline, recipe: Recipe | None, rules: RuleSet, asked: Asked, factor: int
) -> dict[str, torch.Tensor | None]:
    """One call: outputs, gradients, what ops saved, the states of delayed scaling, the input as the call left it."""
    x = (made.x * factor).requires_grad_(asked.inputs and asked.grad)
    leaves = [extra.clone().requires_grad_(asked.grad and extra.is_floating_point()) for extra in made.extras]
    saved: dict[str, torch.Tensor | None] = {}

    def keep(event: TensorSaved) -> None:
        node = event.plan.graph.nodes[event.node]
        if not _keeps_its_own(event.plan, event.node):
            saved.update(_flat(f"what {node.name} saved as {event.name!r}", event.value))

    with subscribed(keep, TensorSaved), use_rules(rules), under(recipe), torch.set_grad_enabled(asked.grad):
        result = model(x, *(leaf.clone() for leaf in leaves))
    outputs = result if isinstance(result, tuple) else (result,)
    named = ["the output", *(f"extra output {i}" for i in range(len(outputs) - 1))]
    tensors: dict[str, torch.Tensor | None] = {name: _values(output) for name, output in zip(named, outputs)}
    read = [output for i, output in enumerate(outputs) if output.requires_grad and (asked.extras or not i)]
    if read:
        grads = [_random(tuple(y.shape), y.dtype, y.device, seed=100 + i) for i, y in enumerate(read)]
        torch.autograd.backward(read, grads)
    tensors["the gradient of the input"] = x.grad
    tensors |= {f"the gradient of extra input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    tensors |= {f"the gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, BasicOperation):
            states = module.quantizer_states.to_dict().items()
            tensors |= {f"the scaling state {key} of {name}": state.clone() for key, state in states}
    return tensors | saved | {"the input after the call": x.detach()}


def _keeps_its_own(plan: Plan, node: int) -> bool:
    """Whether a rule for both passes ran the node: what it saves is its own affair."""
    groups = (group for segment in plan.segments for group in segment.forward if node in group.nodes)
    return any(group.rule is not None and group.rule.direction == JOINT for group in groups)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor).detach().clone()


def _flat(name: str, value: Any) -> dict[str, torch.Tensor | None]:
    """A saved value as tensors: itself, or the parts of its planes."""
    record = value.record if isinstance(value, QuantizedTensor) else value
    if not isinstance(record, QuantizedStorage):
        return {name: record.detach().clone()}
    planes = [record.plane(usage) for usage in record.usages]
    kinds = [f"{usage} {plane.format}" for usage, plane in zip(record.usages, planes)]
    parts = [(f"{name}, {kind}", plane.tensors()) for kind, plane in zip(kinds, planes)]
    return {f"{text}, part {i}": part.detach().clone() for text, tensors in parts for i, part in enumerate(tensors)}


# -- comparing -------------------------------------------------------------------------------------------------------------------


def difference(wanted: Mapping[str, torch.Tensor | None], got: Mapping[str, torch.Tensor | None]) -> FirstDifference | None:
    """The first of the tensors that is not, bit for bit, what it should be. A rule may save less than its ops would."""
    saved = {name for name in (*wanted, *got) if name.startswith("what ")}
    names = [name for name in wanted if name not in saved or name in got]
    wrong = [name for name in names if not _same(wanted[name], got.get(name))]
    return _first(wrong, wanted[wrong[0]], got.get(wrong[0])) if wrong else None


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, a row for each."""
    return tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8)


def _first(wrong: Sequence[str], wanted: torch.Tensor | None, got: torch.Tensor | None) -> FirstDifference:
    name, *others = wrong
    if wanted is None or got is None or wanted.dtype != got.dtype or wanted.shape != got.shape:
        told = ("none" if each is None else f"{dtype_name(each.dtype)} of shape {tuple(each.shape)}" for each in (wanted, got))
        return FirstDifference(name, (), *told, 0, 0, tuple(others))
    differs = (_bits(wanted) != _bits(got)).any(1)
    place = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), wanted.shape))
    values = (repr(each.detach().reshape(-1)[place].item()) for each in (wanted, got))
    return FirstDifference(name, index, *values, int(differs.sum()), wanted.numel(), tuple(others))


# -- the trial -------------------------------------------------------------------------------------------------------------------


class _Cases(NamedTuple):
    """A recipe of the trial by name, and how to make it for tensors of a dtype."""

    kind: str
    override: str | None

    def recipe(self, dtype: torch.dtype) -> Recipe | None:
        """The recipe; None for none."""
        if self.kind == NO_RECIPE:
            return None
        cls = RECIPES[self.kind]
        fields = {**_FIELDS.get(self.kind, {}), **(_FIELDS_IN_FP32.get(self.kind, {}) if dtype == torch.float32 else {})}
        return cls(**fields, **({"backward_override": self.override} if cls.takes_backward_override else {}))


def cases() -> tuple[tuple[str, str | None], ...]:
    """Every kind of recipe, none first, under every backward override that it takes."""
    taken = {kind: tuple(OVERRIDES) if cls.takes_backward_override else (None,) for kind, cls in RECIPES.items()}
    return (NO_RECIPE, None), *((kind, override) for kind, overrides in taken.items() for override in overrides)


def try_rule(
    rule: Fusion, device: torch.device | str = "cpu", *, under_recipes: Sequence[tuple[str, str | None]] | None = None
) -> RuleReport:
    """Run ``rule`` against its ops. under_recipes: kinds and overrides, of :func:`cases`; None: all.

    FusionError for a rule that no rule set takes, and for one of whose pattern no pipeline can be built.
    """
    place = torch.device(device)
    rules = RuleSet(()).with_rule(rule)
    first, *others = _rows(rule)
    full = [TrialCall(first, *each) for each in product((False, True), DTYPES, LEADING)]
    full += [TrialCall(first, True, DTYPES[0], LEADING[0], asked) for asked in FEWER]
    turns = [*product((True, False), DTYPES, LEADING)]
    pipelines: dict[TrialCall, MadePipeline | None] = {}
    left_out: dict[str, None] = {}

    def made(call: TrialCall) -> MadePipeline | None:
        if call not in pipelines:
            pipelines[call] = _first_made(call, rule, place, left_out)
        return pipelines[call]

    results = []
    with warnings.catch_warnings(), torch.random.fork_rng([place] if place.type == "cuda" else []):
        warnings.simplefilter("ignore", OpfuseWarning)  # of emulated products, and of regions without any
        for i, each in enumerate(map(_Cases._make, cases() if under_recipes is None else under_recipes)):
            more = (TrialCall(row, *turns[(i + j) % len(turns)]) for j, row in enumerate(others))
            results.append(_under(rule, rules, each, chain(full, more), made))
    if not any(pipelines.values()):
        got = next(iter(left_out), "a pattern of casts alone")
        cure = "give the arguments of its constructor defaults, or annotate them as int, float or bool"
        raise FusionError(describe(f"fusion {rule.name!r}", wanted="ops that a trial can build", got=got, cure=cure))
    count = len({call.row for call, pipeline in pipelines.items() if pipeline is not None})
    about = rule.name, printed(rule.pattern), rule.direction, rule.source
    return RuleReport(*about, str(place), count, tuple(results), tuple(left_out))


def _first_made(call: TrialCall, rule: Fusion, device: torch.device, left_out: dict[str, None]) -> MadePipeline | None:
    """The pipeline of a call on as many columns as the guards let it have; None if they let it have none."""
    for columns in _widths(rule):
        try:
            return _made(call, rule, device, columns)
        except _UnbuiltError as error:
            reason = str(error)
        except (OpfuseError, RuntimeError) as error:
            reason = str(error) if call.leading == LEADING[0] else ""
    if reason:
        left_out[reason] = None
    return None


def _under(
    rule: Fusion, rules: RuleSet, case: _Cases, calls: Iterator[TrialCall], made: Callable[[TrialCall], MadePipeline | None]
) -> RuleUnderRecipe:
    """What becomes of the rule under one recipe; the first call that goes wrong ends it."""
    found = RuleUnderRecipe(*case, IDLE, 0)
    reasons: Counter[str] = Counter()
    for call in calls:
        if (pipeline := made(call)) is None:
            continue
        recipe = case.recipe(call.dtype)
        ran = _run(pipeline, recipe, rules, call.asked)
        outcomes = [outcome for plan in ran.plans for outcome in plan.outcomes if outcome.rule == rule.name]
        if all(outcome.status != FUSED for outcome in outcomes):
            reasons.update(outcome.reason for outcome in outcomes if outcome.reason)
            continue
        right = _run(pipeline, recipe, rules.without(rule.name), call.asked)
        if right.error is not None:
            reasons[f"the ops refuse the call: {right.error}"] += 0
            continue
        found = replace(found, status=EQUAL, fired=found.fired + 1)
        if ran.error is not None:
            return replace(found, status=RAISED, call=pipeline.text, error=_told(ran.error, rule))
        if (wrong := difference(right.tensors, ran.tensors)) is not None:
            return replace(found, status=DIFFERENT, call=pipeline.text, difference=wrong)
    return replace(found, reasons=tuple(reason for reason, _ in reasons.most_common()))


def _told(error: Exception, rule: Fusion) -> str:
    """An error, and the line of the rule's own file that raised it."""
    files = {code.co_filename for run in (rule.forward, rule.backward) if (code := getattr(run, "__code__", None))}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{type(error).__name__}: {error}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")
