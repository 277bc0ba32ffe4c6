"""The pipelines in which a fusion rule is tried: ops that its pattern matches, with hyper-parameters that its guards allow.

All places of the pattern are filled in the first one; in each other one a place is empty, has one node more, or has another op
that one of its words means. Each stands alone and between two products; ops in groups of rows stand behind a dispatch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice, product
from typing import Any, NamedTuple

import torch

from opfuse import ops
from opfuse.compiler.graph import BACKWARD, CAST_WORDS, QUANTIZE_GROUPS
from opfuse.compiler.rules import Fusion, Guard, is_
from opfuse.compiler.vocabulary import classes_named, declared_traits
from opfuse.config.operations import OPS
from opfuse.core.cast import GRADIENT
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import PLACEMENT, argument
from opfuse.domains import BOOLEAN
from opfuse.formats import dtype_name

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


class PlacedOp(NamedTuple):
    """An op at a place of the pattern, or beside it. cls: None for a cast. guards: those on its fields."""

    cls: type[BasicOperation] | None
    guards: tuple[Guard, ...] = ()
    groups: bool = False

    @property
    def name(self) -> str:
        """The name of the class."""
        return "a cast" if self.cls is None else self.cls.__name__


class TrialCall(NamedTuple):
    """One call. row: the ops of the pattern. between: whether products stand before and behind them."""

    row: tuple[PlacedOp, ...]
    between: bool
    dtype: torch.dtype
    leading: tuple[int, ...]
    asked: Asked = ALL


class MadePipeline(NamedTuple):
    """A pipeline, what a call of it takes, and which gradients are asked for. text: how reports call it."""

    asked: Asked
    model: ops.Sequential
    x: torch.Tensor
    extras: tuple[torch.Tensor, ...]
    text: str


class RulePipelines:
    """The pipelines of a rule, each made once. left_out: why some could not be."""

    def __init__(self, rule: Fusion, device: torch.device) -> None:
        self.rule, self.device = rule, device
        self.left_out: dict[str, None] = {}
        self._first, *self._others = dict.fromkeys(_rows(rule))
        self._made: dict[TrialCall, MadePipeline | None] = {}

    @property
    def count(self) -> int:
        """How many rows of ops there are pipelines of."""
        return len({call.row for call, pipeline in self._made.items() if pipeline is not None})

    def calls(self, turn: int) -> Iterator[MadePipeline]:
        """The first pipeline in every way, then each other one in one way; which, goes by turns."""
        turns = [*product((False, True), DTYPES, LEADING)]
        yield from self._of(TrialCall(self._first, *way) for way in turns)
        yield from self._of(TrialCall(self._first, True, DTYPES[0], LEADING[0], asked) for asked in FEWER)
        yield from self._of(TrialCall(row, *turns[(turn + i) % len(turns)]) for i, row in enumerate(self._others))

    def _of(self, calls: Iterable[TrialCall]) -> Iterator[MadePipeline]:
        for call in calls:
            if call not in self._made:
                self._made[call] = self._make(call)
            if (made := self._made[call]) is not None:
                yield made

    def _make(self, call: TrialCall) -> MadePipeline | None:
        """The pipeline of a call on as many columns as the guards let it have; None if they let it have none."""
        refused = ""
        for columns in _widths(self.rule):
            try:
                return _made(call, self.rule.direction, self.device, columns)
            except _UnbuiltError as error:
                refused = refused or str(error)
            except Exception as error:  # of an op; a tail, or no row, is not for every one
                refused = refused or (str(error) if call.leading == LEADING[0] else "")
        if refused:
            self.left_out[refused] = None
        return None


def _classes(word: str) -> list[type[BasicOperation]]:
    """The ops that a word of a pattern means: of its kind, or built-in ones of that trait."""
    known = [cls for cls in OPS.values() if issubclass(cls, BasicOperation)]
    return classes_named(word) or [cls for cls in known if word in declared_traits(cls)]


def _rows(rule: Fusion) -> Iterator[tuple[PlacedOp, ...]]:
    """The ops of each pipeline; the first has something at every place."""
    options = [_options(rule, place) for place in range(len(rule.pattern))]
    counts = [max(term.low, 1 if term.high is not None else 2) for term in rule.pattern]
    yield _row(options, counts)
    for i, term in enumerate(rule.pattern):
        if term.low < counts[i]:
            yield _row(options, [*counts[:i], term.low, *counts[i + 1 :]])
        if term.high is None or term.high > counts[i]:
            yield _row(options, [*counts[:i], counts[i] + 1, *counts[i + 1 :]])
        for other in options[i][1:]:
            yield _row([*options[:i], [other, options[i][0]], *options[i + 1 :]], counts)


def _row(options: Sequence[Sequence[PlacedOp]], counts: Sequence[int]) -> tuple[PlacedOp, ...]:
    return tuple(chain.from_iterable(islice(cycle(choices), count) for choices, count in zip(options, counts)))


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


def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """What the constructor takes, but for devices and the like."""
    _, *found = inspect.signature(cls.__init__).parameters.values()
    named = (each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return {each.name: each for each in named if each.name not in PLACEMENT}


_PRODUCT = PlacedOp(ops.BasicLinear)
_GROUPED = PlacedOp(ops.GroupedLinear, groups=True)


def _with_neighbours(call: TrialCall, direction: str) -> list[PlacedOp]:
    """The ops of a call: each cast becomes that of the product beside it, or an explicit one if there is none."""
    row, grouped = [*call.row], any(op.groups for op in call.row)
    neighbour = _GROUPED if grouped else _PRODUCT
    if (row[0].cls is None and direction == BACKWARD) or (call.between and row[0].cls is not ops.TokenDispatch):
        row.insert(0, neighbour)
    if (row[-1].cls is None and direction != BACKWARD) or call.between:
        row.append(neighbour)
    made: list[PlacedOp] = []
    for i, op in enumerate(row):
        if op.cls is not None:
            made.append(op)
            continue
        beside, role = (row[i - 1], GRADIENT) if direction == BACKWARD else (row[min(i + 1, len(row) - 1)], "input")
        if beside.cls is None or (role not in beside.cls.roles and not beside.groups):
            backward = direction == BACKWARD
            fixed = {"forward": not backward, "backward": backward}
            made.append(PlacedOp(ops.Quantize, tuple(is_(f"quantize.{name}", value) for name, value in fixed.items())))
    return made


_COLUMNS = ("in_features", "features", "normalized_shape", "size")
"""Arguments that say how many columns an op takes."""

_ARGUMENTS: Mapping[str, Any] = {"scale": 0.3, "bias": False, "p": 0.25, "num_groups": GROUPS, "pad_splits": True, "top_k": 2}
"""What other arguments are, where guards do not want another value: a scale that rounds, groups that casts take."""

_BY_TYPE: Mapping[Any, Any] = {
    **dict.fromkeys((int, "int", "Size"), WIDTH),
    **dict.fromkeys((float, "float", "Positive", "NonNegative"), 0.3),
    **dict.fromkeys((bool, "bool"), False),
}
"""What an argument without a default is, by its annotation, which is text in most modules."""

_CHANNELS: Mapping[str, str] = {"grouped_linear": "splits", "token_combine": "places"}
"""The channel of a dispatch that an op reads; activations in groups read the probabilities."""


class _UnbuiltError(Exception):
    """An op cannot be built so that its guards pass; the text says why."""


def _arguments(op: PlacedOp, columns: int, wide: int) -> dict[str, Any]:
    """The arguments of an op on so many columns, which makes ``wide`` if it can choose."""
    chosen: dict[str, Any] = {}
    for name, parameter in _parameters(op.cls).items():
        guards = [guard for guard in op.guards if argument(guard.reads.rpartition(".")[2]) == name]
        if name in _COLUMNS:
            candidates: list[Any] = [columns]
        elif name == "out_features":
            candidates = [wide, *_wanted(guards)]
        elif name == "shape":
            candidates = [(-1, columns)]
        elif name in _ARGUMENTS:
            candidates = [_ARGUMENTS[name], *_wanted(guards)]
        else:
            required = parameter.default is parameter.empty
            usual = [_BY_TYPE[parameter.annotation]] if required and parameter.annotation in _BY_TYPE else []
            candidates = [*(usual if required else [parameter.default]), *_wanted(guards)]
        passing = [value for value in candidates if all(guard.ok(value) for guard in guards)]
        if not passing:
            asked = "; ".join(f"{guard.reads} wants {guard.wanted_text}" for guard in guards)
            raise _UnbuiltError(f"no value is known for the argument {name!r} of {op.name}{asked and f': {asked}'}")
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
    if guards:
        yield math.lcm(*numbers) * -(-WIDTH // math.lcm(*numbers))
        yield math.lcm(*numbers)


def _widths(rule: Fusion) -> list[int]:
    """Numbers of columns that the input may have: the usual one, then those that guards want."""
    sizes = [guard for guard in rule.when if guard.reads.rpartition(".")[2] in (*_COLUMNS, "out_features")]
    by_name = [[guard for guard in sizes if guard.reads == name] for name in dict.fromkeys(guard.reads for guard in sizes)]
    found = (value for guards in by_name for value in _wanted(guards) if type(value) is int and value > 0)
    return [*dict.fromkeys((WIDTH, *found))]


def _made(call: TrialCall, direction: str, device: torch.device, columns: int) -> MadePipeline:
    """The pipeline of a call. _UnbuiltError where guards or constructors refuse; other errors where ops refuse the input."""
    placed = _with_neighbours(call, direction)
    grouped = any(op.groups for op in placed)
    if grouped and placed[0].cls is not ops.TokenDispatch:
        placed.insert(0, PlacedOp(ops.TokenDispatch))
    if grouped:
        placed.append(PlacedOp(ops.TokenCombine))
    x = value = random_values((*call.leading, columns), call.dtype, device, seed=0)
    model, extras, channels = list[BasicOperation](), list[torch.Tensor](), dict[str, torch.Tensor]()
    for i, op in enumerate(placed):
        built, tried = (_built(op, value.shape[-1], columns, call.dtype, device) for _ in range(2))
        kind = built.kind
        name = _CHANNELS.get(kind) or ("probabilities" if kind.startswith("scaled_") else None)
        read = name if grouped and name in channels else None
        outputs, given = _tried(tried, value, [channels[read]] if read else None, seed=1 + i)
        value, *more = outputs
        if read:
            built.set_extra_input_channel(0, read)
        else:
            extras += given
        if grouped and kind == "token_dispatch":
            channels |= dict(zip(("splits", "probabilities", "places"), more))
        model.append(built)
    readers = {channel.name for op in model for channel in op.extra_input_channels}
    for i, output in enumerate(channels):
        if output in readers:
            model[0].set_extra_output_channel(i, output)
    text = " ".join(op.label for op in model)
    where = f"{text} on {dtype_name(call.dtype)} of shape {tuple(x.shape)}{call.asked.text}"
    return MadePipeline(call.asked, ops.Sequential(*model), x, tuple(extras), where)


def _built(op: PlacedOp, columns: int, wide: int, dtype: torch.dtype, device: torch.device) -> BasicOperation:
    """The op, with parameters that are neither all zero nor all one."""
    cls: Any = op.cls
    arguments = _arguments(op, columns, wide)
    placement = {"device": device, "dtype": dtype}
    accepted = inspect.signature(cls.__init__).parameters
    try:
        built: BasicOperation = cls(**arguments, **{name: placement[name] for name in placement if name in accepted})
    except Exception as error:  # of the user's constructor, too
        raise _UnbuiltError(f"{op.name} cannot be built: {error}") from error
    built.to(device, dtype)
    with torch.no_grad():
        for i, parameter in enumerate(built.parameters()):
            parameter.add_(0.25 * random_values(tuple(parameter.shape), parameter.dtype, device, seed=11 + i))
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
    refusal = Exception()
    with torch.no_grad():
        for found in product(shapes, repeat=0 if given is not None else op.num_extra_inputs):
            made = [random_values(shape, x.dtype, x.device, seed=100 * seed + i) for i, shape in enumerate(found)]
            try:
                result = op(x.clone(), *(each.clone() for each in given or made))
            except Exception as error:  # whatever an op of the user's raises
                refusal = error
                continue
            outputs = result if isinstance(result, tuple) else (result,)
            return tuple(output.detach().clone() for output in outputs), made
    raise refusal


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int) -> torch.Tensor:
    """Normal values that depend on shape and seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device, dtype)
