"""Cases of chains that end in a cast."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, USAGES, Element, NumberFormat, Usage, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.casts.encoding import (
    Blocks,
    BlocksOfGroups,
    Current,
    EncodedArrays,
    Encoding,
    Measured,
    Microscaled,
    RecordingScale,
)
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups
from tests.kernels.cases.chains import BF16, FP16, FP32, OPS, ChainCase
from tests.kernels.cases.groups import SIZES, groups_of, known_groups


class _CastKind(NamedTuple):
    """A kind of cast: the format of an element, and the encoding of planes on a device."""

    format: Callable[[Element], NumberFormat]
    encoding: Callable[[list[Layout], torch.device], Encoding]
    swizzled: bool = False


def _recording(layouts: list[Layout], device: torch.device) -> RecordingScale:
    return RecordingScale(torch.full((1,), 3.7, device=device), torch.full((1,), 2.0**-20, device=device), layouts)


def _measured(layouts: list[Layout], device: torch.device) -> Measured:
    def under(amax: torch.Tensor) -> Current:
        return Current(amax, layouts, eps=2.0**-20, pow2=layouts[0].element is E5M2)

    def cast(x: torch.Tensor, amax: torch.Tensor | None) -> list[EncodedArrays]:
        return under(tensor_amax(x) if amax is None else amax)(x)

    return Measured(layouts, cast, under)


def _of_groups(layouts: list[Layout], groups: RowGroups) -> BlocksOfGroups:
    """The cast of a matrix in groups to these planes, of which columnwise ones are of the padded matrix."""
    shapes = {ROWWISE: layouts[0].shape, COLUMNWISE: (groups.padded_rows, layouts[0].shape[1])}
    return BlocksOfGroups([layout.replace(shape=shapes[layout.usage]) for layout in layouts], groups)


def _thirds(layouts: list[Layout], device: torch.device) -> BlocksOfGroups:
    """Groups of a third of the rows, of none, and of the rest."""
    rows = layouts[0].shape[0]
    return _of_groups(layouts, groups_of((rows // 3, 0, rows - rows // 3), device))


OF_GROUPS = "1x128 of groups"

_KINDS = {
    "delayed": _CastKind(fp8_tensor, _recording),
    "current": _CastKind(fp8_tensor, _measured),
    "1x128": _CastKind(lambda element: fp8_block(element, 1), lambda layouts, _: Blocks(layouts)),
    "128x128": _CastKind(lambda element: fp8_block(element, 2), lambda layouts, _: Blocks(layouts, eps=0.25, pow2=False)),
    OF_GROUPS: _CastKind(lambda element: fp8_block(element, 1), _thirds),
    "MX": _CastKind(mxfp8, lambda layouts, _: Microscaled(layouts)),
    "MX swizzled": _CastKind(mxfp8, lambda layouts, _: Microscaled(layouts), swizzled=True),
    "MX floor": _CastKind(mxfp8, lambda layouts, _: Microscaled(layouts, rounding="floor")),
}

_FORWARD = (
    ChainCase(("bias", "gelu"), (272, 200)),
    ChainCase(("bias", "gelu"), (300, 264), source=FP32),
    ChainCase(("bias", "gelu"), (3, 67, 40), source=FP32, rounding="single"),
    ChainCase(("bias", "gelu"), (5, 67)),
    ChainCase(("glu",), (129, 9)),
    ChainCase(("bias", "swiglu"), (257, 128)),
    ChainCase(("bias", "swiglu"), (144, 192), interleave=64),
    ChainCase(("bias", "reglu"), (65, 48), FP16, interleave=8),
    ChainCase(("bias", "softsign", "dropout"), (130, 520), FP16, misaligned=True),
    ChainCase(("bias", "constant_scale", "add"), (65, 136), FP32),
    ChainCase(("scaled_srelu",), (512, 64)),
)
_BACKWARD = (
    *_FORWARD,
    ChainCase(("bias",), (300, 264)),
    ChainCase(("add", "bias"), (16, 64), FP32),
    ChainCase(("bias", "scaled_swiglu", "bias"), (300, 256), interleave=128),
    ChainCase(("bias", "reglu", "relu", "reglu"), (65, 48), FP16),
)
_GROUPS = (
    ChainCase(("gelu",), (272, 200)),
    ChainCase(("add", "gelu"), (300, 264), source=FP32),
    ChainCase(("constant_scale", "silu"), (5, 67)),
    ChainCase(("softsign", "dropout"), (130, 520), FP16, misaligned=True),
    ChainCase(("swiglu",), (257, 128)),
    ChainCase(("scaled_swiglu",), (300, 256)),
    ChainCase(("scaled_swiglu",), (144, 256), FP16, interleave=128),
    ChainCase(("scaled_situglu", "dropout"), (130, 384)),
    ChainCase(("reglu", "constant_scale"), (65, 48), FP16, interleave=8),
    ChainCase(("bias", "swiglu"), (257, 128)),
)
"""Chains whose gradient is cast in groups; the last one sums over rows, so it runs apart."""
_MX = (
    ChainCase(("bias", "gelu"), (288, 416)),
    ChainCase(("bias", "gelu"), (96, 160), source=FP32),
    ChainCase(("bias", "gelu"), (3, 64, 32), source=FP32, rounding="single"),
    ChainCase(("glu",), (160, 256)),
    ChainCase(("bias", "swiglu"), (96, 512), interleave=256),
    ChainCase(("bias", "softsign", "dropout"), (160, 544), FP16, misaligned=True),
    ChainCase(("bias", "constant_scale", "add"), (64, 288), FP32),
    ChainCase(("scaled_srelu",), (512, 64)),
)
_PLANES: tuple[tuple[Usage, ...], ...] = ((ROWWISE, COLUMNWISE), (ROWWISE,), (COLUMNWISE,))
_STORES = (False, False, True, False)
_CHAINS = {
    "forward": {
        **dict.fromkeys(("delayed", "current", "1x128", "128x128"), _FORWARD),
        **dict.fromkeys(("MX", "MX swizzled", "MX floor"), _MX),
        OF_GROUPS: _FORWARD,
    },
    "backward": {
        **dict.fromkeys(("delayed", "1x128"), _BACKWARD),
        "128x128": _FORWARD,
        **dict.fromkeys(("MX", "MX swizzled"), _MX),
        OF_GROUPS: _GROUPS,
    },
}


_NONFINITE = (
    (("bias", "relu", "add"), FP16, ("bias", "reglu"), BF16),
    (("bias", "relu"), BF16, ("reglu", "constant_scale"), FP32),
    (("constant_scale", "relu"), FP32, ("reglu", "bias"), FP16),
    (("constant_scale", "relu"), FP16, ("reglu", "constant_scale"), BF16),
)
"""A plain chain and a gated one, for each kind of cast in turn, of ops that treat nonfinite values as their definition does."""


def _nonfinite(kinds: Sequence[str]) -> dict[str, Sequence[ChainCase]]:
    def chain(ops: tuple[str, ...], io: torch.dtype) -> ChainCase:
        return ChainCase(ops, (288, 256), io, values="nonfinite")

    return {kind: (chain(*of[:2]), chain(*of[2:])) for kind, of in zip(kinds, itertools.cycle(_NONFINITE))}


class Combination(NamedTuple):
    """What a call makes of the result of a chain: the cast, its planes, and whether the result itself is stored."""

    kind: str
    usages: tuple[Usage, ...]
    element: Element
    stores: bool

    def __str__(self) -> str:
        return f"{self.kind}, {self.element.name}, {'+'.join(self.usages)}{', stored' * self.stores}"


def chain_case(chain: ChainCase, direction: str, turn: Combination, device: torch.device) -> Arguments:
    args, kwargs = getattr(chain, direction)(device)
    shape = chain.stages(device, chain.generator())[0] if direction == "backward" else chain.shape
    matrix = (torch.Size(shape[:-1]).numel(), shape[-1])
    return Arguments(
        (*args, encoding_of(turn.kind, turn.element, turn.usages, matrix, device)), {**kwargs, "stores": turn.stores}
    )


def encoding_of(name: str, element: Element, usages: Sequence[Usage], matrix: tuple[int, int], device: torch.device) -> Encoding:
    """The cast of a matrix by the kind of this name."""
    kind = _KINDS[name]
    return kind.encoding([Layout(kind.format(element), usage, matrix, kind.swizzled) for usage in usages], device)


def _cases(direction: str, chains: Mapping[str, Sequence[ChainCase]]) -> dict[str, Case]:
    """Every chain with the kinds that it is there for, each with one choice of planes, element and storing in turn."""
    turns = zip(itertools.cycle(_PLANES), itertools.cycle((E4M3, E5M2)), itertools.cycle(_STORES))
    made = [(chain, Combination(kind, *next(turns))) for kind, of_kind in chains.items() for chain in of_kind]
    return {f"{chain.name}, {turn}": functools.partial(chain_case, chain, direction, turn) for chain, turn in made}


_IN_GROUPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "forward": (("scaled_swiglu",), ("bias", "relu"), ("reglu", "scaled_srelu")),
    "backward": (("scaled_swiglu",), ("relu", "constant_scale"), ("reglu", "constant_scale")),
}
"""Chains over groups of all sizes, two of them with the definition's bits."""


def _grouped(sizes: str, chain: ChainCase, direction: str, turn: Combination, device: torch.device) -> Arguments:
    args, kwargs = chain_case(chain, direction, turn, device)
    *rest, made = args
    layouts = [layout.replace(shape=(chain.shape[0], layout.shape[1])) for layout in made.layouts]
    return Arguments((*rest, _of_groups(layouts, known_groups(sizes, device))), kwargs)


def _in_groups(direction: str) -> dict[str, Case]:
    """Chains over groups of rows, of all sizes, with whole packs of columns and without, all planes and elements in turn."""
    planes = itertools.cycle((USAGES, USAGES, (ROWWISE,), USAGES, (COLUMNWISE,)))
    turns = zip(planes, itertools.cycle((E4M3, E5M2)), itertools.cycle(_STORES))
    calls = itertools.product(SIZES, _IN_GROUPS[direction])
    made: dict[str, Case] = {}
    for (name, ops), columns, turn in zip(calls, itertools.cycle((256, 200, 67, 384)), turns):
        chain, made_of = ChainCase(ops, (sum(SIZES[name]), columns)), Combination(OF_GROUPS, *turn)
        made[f"{chain.name}, {made_of}, {name}"] = functools.partial(_grouped, name, chain, direction, made_of)
    return made


# -- as the library calls them -----------------------------------------------------------------------------------------------

_MADE = {
    "forward": ("delayed", "current", "1x128", OF_GROUPS, "128x128", "MX", "MX swizzled"),
    "backward": ("delayed", "1x128", "128x128", OF_GROUPS, "MX", "MX swizzled"),
}
_PIPELINES = (("gelu",), ("bias", "gelu"), ("swiglu",), ("bias", "swiglu"))
_ORDINARY = (
    *_PIPELINES,
    ("bias", "silu"),
    ("bias", "relu"),
    ("bias", "srelu"),
    ("bias", "add"),
    ("bias", "geglu"),
    ("bias", "situglu"),
    ("bias", "clamped_swiglu"),
    ("bias", "scaled_srelu"),
    ("bias", "scaled_tanh_srelu"),
    ("bias", "gelu", "add"),
    ("bias", "add", "silu"),
    ("bias", "dropout", "add"),
    ("bias", "dropout", "gelu"),
    ("bias", "silu", "dropout"),
    ("bias", "swiglu", "dropout"),
    ("constant_scale", "bias", "swiglu"),
    ("swiglu", "bias"),
    ("bias", "gelu", "dropout", "add"),
    ("bias", "gelu", "constant_scale", "bias"),
)


class _CallForm(NamedTuple):
    """What a call makes, beside gradients of operands.

    usages: planes. stores: the result itself. keeps: the inputs of stages that a backward pass reads.
    """

    usages: tuple[Usage, ...] = USAGES
    stores: bool = False
    keeps: bool = False


_FORMS = {
    "forward": {
        "both": _CallForm(),
        "both, kept": _CallForm(keeps=True),
        "rows": _CallForm((ROWWISE,)),
        "rows, stored": _CallForm((ROWWISE,), True, True),
    },
    "backward": {"both": _CallForm()},
}
"""In training: both planes, and what a backward pass reads. Without one: rows. With one in high precision: the result, too."""


def _made(ops: tuple[str, ...], direction: str, kind: str, form: _CallForm, device: torch.device) -> Arguments:
    element = E5M2 if (direction, kind) == ("backward", "delayed") else E4M3
    args, kwargs = chain_case(ChainCase(ops, (256, 512)), direction, Combination(kind, form.usages, element, form.stores), device)
    keep = _read(ops) if form.keeps else ()
    return Arguments(args, {**kwargs, "keep": keep} if direction == "forward" else kwargs)


def _read(ops: tuple[str, ...]) -> tuple[int, ...]:
    """The stages whose inputs a backward pass reads and the forward pass has to store; the first stage's is there already."""
    return tuple(i for i, name in enumerate(ops) if i and OPS[name].needs_input)


def _as_called(direction: str, chains: Sequence[tuple[str, ...]]) -> dict[str, Case]:
    """Every chain with every cast, in each form that has a kernel of its own."""
    return {
        f"{' '.join(ops)} as called, {kind}, {name}": functools.partial(_made, ops, direction, kind, form)
        for ops, kind, (name, form) in itertools.product(chains, _MADE[direction], _FORMS[direction].items())
        if name != "both, kept" or _read(ops)
    }


FORWARD, BACKWARD = (
    {
        **_cases(direction, chains),
        **_cases(direction, _nonfinite(_MADE[direction])),
        **_in_groups(direction),
        **_as_called(direction, _PIPELINES),
    }
    for direction, chains in _CHAINS.items()
)

AS_CALLED = {direction: _as_called(direction, (*((name,) for name in OPS), *_ORDINARY)) for direction in _CHAINS}
"""By direction: every built-in op and ordinary chains, with every cast, in the form in which they are called."""

CASES: CaseTable = {
    forward_chain_cast: FORWARD,
    backward_chain_cast: BACKWARD,
}
