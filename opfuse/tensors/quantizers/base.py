"""What every quantizer does: check the input, cast the directions asked for, rewrite an existing storage; whose code it is."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch

from opfuse.errors import DtypeError, QuantizerError, ShapeError, describe
from opfuse.formats import COLUMNWISE, FP8_ELEMENTS, ROWWISE, USAGES, Element, NumberFormat, Usage
from opfuse.kernels.casts.encoding import EncodedArrays, Encoding, Measured, Ruled
from opfuse.numerics.layouts import SCALE_DTYPES, Layout, are_known, layout_of, round_up
from opfuse.numerics.rules import Formula, Way, way_of
from opfuse.tensors.quantizers.ranks import AmaxRanks
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape

_CHOSEN: dict[tuple[bool, bool], tuple[Usage, ...]] = {
    (True, True): USAGES,
    (True, False): (ROWWISE,),
    (False, True): (COLUMNWISE,),
    (False, False): (),
}
"""The directions that a quantizer makes, by its (rowwise, columnwise)."""

_APART = ("identity", "block", "mx")
"""Families of formats whose rows share nothing beyond their blocks."""

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SharedAmax:
    """The amax of one tensor, for all casts of it: the first finds it, later ones read it.

    amax: fp32 (1,), or (G,) of a tensor in G groups of which one kernel found them; None before it is found. groups: that of each
    group, where they are cast one by one.
    """

    amax: torch.Tensor | None = None
    groups: Sequence[SharedAmax] = ()

    @classmethod
    def of(cls, amaxes: Sequence[torch.Tensor]) -> Self:
        """One that is known, from its :meth:`tensors`."""
        shared = cls()
        if len(amaxes) == 1:
            (shared.amax,) = amaxes
        else:
            shared.groups = [cls.of([amax]) for amax in amaxes]
        return shared

    def tensors(self) -> list[torch.Tensor]:
        """What there is to be kept: none unless all are known, since groups are told apart by their places."""
        every = self.groups or [self]
        found = [each.amax for each in every if each.amax is not None]
        return found if len(found) == len(every) else []

    def apart(self, count: int) -> Sequence[SharedAmax]:
        """That of each of so many groups."""
        if not self.groups:
            amaxes = [None] * count if self.amax is None else self.amax.split(1)
            self.groups = [SharedAmax.of([] if amax is None else [amax]) for amax in amaxes]
        return self.groups


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantizer(ABC):
    """How a tensor is cast: its formats, the directions to make, the layout of scales.

    Quantizers are equal when all their settings are; tensors and process groups that they hold are not compared.

    A parameter is stored with its quantizer. For a class of one's own, ``torch.load`` with ``weights_only=True``, its default,
    wants ``torch.serialization.add_safe_globals([TheClass])`` first, else it raises UnpicklingError.

    Args:
        rowwise: make the plane whose blocks run along the last dimension.
        columnwise: make the plane whose blocks run along all the other dimensions.
        optimize_for_gemm: store scales in the tile layout that matrix products read, in formats that have one.
    """

    rowwise: bool = True
    columnwise: bool = True
    optimize_for_gemm: bool = False

    runs_code_of_others: ClassVar[bool] = False
    """Whether a cast runs code that is not opfuse's, so that no recording can repeat it."""

    follows_amax: ClassVar[Any] = False
    """Whether all scales follow from the amax of the tensor as it is, which its casts may then share, as ``shared_amax``."""

    wrap: ClassVar[Callable[[torch.Tensor, Quantizer], Any]] = staticmethod(lambda x, quantizer: quantizer.quantize(x))
    """What calling a quantizer does. ``opfuse/tensors/__init__.py`` sets it to a cast that has a gradient and makes a tensor."""

    @property
    @abstractmethod
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        """The rowwise and the columnwise format, whether or not the direction is asked for."""

    @abstractmethod
    def _planes(self, x: torch.Tensor) -> list[Plane]:
        """The planes asked for, of an input that has passed all checks."""

    @abstractmethod
    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        """The planes asked for, of a tensor of ``shape``, with every byte 0."""

    @property
    def usages(self) -> tuple[Usage, ...]:
        """The directions asked for."""
        return _CHOSEN[bool(self.rowwise), bool(self.columnwise)]

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a cast changes besides its output."""
        return ()

    def __repr__(self) -> str:
        """The class and the settings that differ from their defaults."""
        shown = [f for f in fields(self) if f.repr and (f.default is MISSING or getattr(self, f.name) != f.default)]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def __getstate__(self) -> dict[str, Any]:
        """All settings but a process group, which belongs to the process that made it."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "amax_reduction_group"}

    def __call__(self, x: torch.Tensor) -> Any:
        """The quantized tensor of ``x``, of any shape with at least one dimension."""
        return type(self).wrap(x, self)

    def quantize(self, x: torch.Tensor) -> QuantizedStorage:
        """The planes of ``x`` (fp32, bf16, fp16), without autograd. ShapeError or DtypeError if the format cannot take it."""
        self._check(x.shape, x.dtype)
        return self._storage(x.shape, x.dtype, self._planes(x.resolve_neg()))  # kernels read what lies in memory

    def encoding(self, shape: Sequence[int], dtype: torch.dtype) -> Encoding | None:
        """The cast of a tensor as a value, for the kernel that makes the tensor; :meth:`storage` takes its results.

        None for most quantizers that are made of others, for a subclass with its own ``quantize``, and for a format that kernels
        do not know. ShapeError or DtypeError as by :meth:`quantize`.
        """
        return None

    def storage(
        self, shape: Sequence[int], dtype: torch.dtype, encoding: Encoding, encoded: Sequence[EncodedArrays]
    ) -> QuantizedStorage:
        """What :meth:`quantize` makes of a tensor of ``shape`` and ``dtype`` whose ``encoding`` gave ``encoded``."""
        planes = [plane_of(layout, *arrays) for layout, arrays in zip(encoding.layouts, encoded, strict=True)]
        return self._storage(torch.Size(shape), dtype, planes)

    @torch.no_grad()
    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedStorage,
        *,
        noop_flag: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> QuantizedStorage:
        """Rewrite in place every plane that ``dst`` holds with the cast of ``src``, and bump the versions that autograd checks.

        A nonzero ``noop_flag`` of one element leaves all bytes and all state as they are, without the host reading it. amax: the
        amax over the ranks that a :meth:`measured` cast would find, if it is known already.
        """
        self._check_update(src, dst)
        before = [tensor.clone() for tensor in self.state]
        made = self.wanting(rowwise=dst.rowwise is not None, columnwise=dst.columnwise is not None)._quantized(src, amax)
        planes = [(dst.plane(usage), made.plane(usage)) for usage in dst.usages]
        pairs = [pair for old, new in planes for pair in zip(old.tensors(), new.with_swizzle(swizzled=old.swizzled).tensors())]
        if noop_flag is None:
            for old, new in pairs:
                old.copy_(new.reshape(old.shape))
            return dst
        keep = noop_flag.reshape(()) != 0
        for old, new in pairs:
            old.copy_(torch.where(keep, old, new.reshape(old.shape)))
        for tensor, old in zip(self.state, before):
            tensor.copy_(torch.where(keep, old, tensor))
        return dst

    def measured(self, shape: Sequence[int], dtype: torch.dtype) -> Measured | None:
        """The cast of this rank's rows under an amax over the ranks that the caller finds, where :meth:`quantize` would find it.

        None unless one amax is all that the ranks share. ShapeError or DtypeError as by :meth:`quantize`.
        """
        alone = self._reducing(None, reduces=False) if getattr(self, "with_amax_reduction", False) else None
        found = None if alone is None else alone.encoding(shape, dtype)
        return found if isinstance(found, Measured) else None

    def _quantized(self, x: torch.Tensor, amax: torch.Tensor | None) -> QuantizedStorage:
        encoding = None if amax is None else self.measured(x.shape, x.dtype)
        if amax is None or encoding is None:
            return self.quantize(x)
        return self.storage(x.shape, x.dtype, encoding, encoding.given(x.detach().resolve_neg(), amax))

    def make_empty(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> QuantizedStorage:
        """A storage of this quantizer's planes with every byte 0, to be filled by :meth:`update_quantized`."""
        self.check(shape)
        return self._storage(torch.Size(shape), dtype, self._empty_planes(shape, dtype, device))

    def wanting(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Self:
        """A copy that makes other directions; None keeps what this one makes."""
        rowwise = self.rowwise if rowwise is None else rowwise
        return replace(self, rowwise=rowwise, columnwise=self.columnwise if columnwise is None else columnwise)

    @property
    def planes_agree(self) -> bool:
        """Whether both planes of every cast hold the same values, so that either can be made from the other."""
        return False

    def reducing(self, group: AmaxRanks) -> Quantizer | None:
        """A quantizer for one rank's rows of a tensor, whose amaxes are found over all ranks of ``group``.

        Itself if rows share nothing beyond their blocks, or if it reduces amaxes already; None if pieces cannot be cast so.
        """
        reduces: bool | None = getattr(self, "with_amax_reduction", None)
        if reduces is None:
            return self if all(fmt.family in _APART for fmt in self.formats) else None
        return self if reduces else self._reducing(group)

    def on_one_rank(self) -> Quantizer:
        """A quantizer of equal settings that takes amaxes of its own tensor alone; itself if it does so."""
        return self._reducing(None, reduces=False) if getattr(self, "with_amax_reduction", False) else self

    def _reducing(self, group: AmaxRanks, *, reduces: bool = True) -> Self:
        return replace(self, with_amax_reduction=reduces, amax_reduction_group=group)  # type: ignore[call-arg]

    def sharing(self, amax: SharedAmax) -> Self | None:
        """A quantizer for casts of one tensor, in either direction, of which only the first looks for the tensor's amax.

        None unless scales follow from the amax of the tensor as it is.
        """
        if not self.follows_amax:
            return None
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), shared_amax=amax)  # with all that follows from the settings, which are the same
        return twin

    def of_groups(self, start: int, stop: int) -> Quantizer:
        """A quantizer for groups [start, stop) of a stack, where this one has one for each; groups beyond these repeat them."""
        return self

    @property
    def row_local(self) -> bool:
        """Whether each row of the rowwise plane is what a cast of that row alone would be."""
        mixes = getattr(self, "with_2d_quantization", False) or getattr(self, "stochastic_rounding", False)
        return self.formats[0].row_local and not (mixes or self.runs_code_of_others)

    def copy(self) -> Self:
        """Another object of equal settings; tensors that it holds are shared."""
        return replace(self)

    def is_quantizable(self, x: torch.Tensor) -> bool:
        """Whether :meth:`quantize` takes ``x``."""
        try:
            self._check(x.shape, x.dtype)
        except (ShapeError, DtypeError):
            return False
        return True

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes that a cast takes; None: any."""
        return INPUT_DTYPES

    def check(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        where: str | None = None,
        cure: Callable[[Layout], str] | None = None,
    ) -> None:
        """ShapeError unless a tensor of ``shape`` has the planes asked for: divisibility is a rule of each plane.

        DtypeError unless it can be of ``dtype``, where one is given. ``where`` begins the message, which ends with what ``cure``
        says of the plane.
        """
        taken = self.input_dtypes
        if dtype is not None and taken is not None and dtype not in taken:
            wanted = ", ".join(map(str, taken))
            convert = f"cast the input to {taken[0]}" if taken else "use formats that share one"
            raise DtypeError(describe(where or type(self).__name__, wanted=wanted, got=dtype, cure=convert))
        if not shape:
            scalar = {"wanted": "at least one dimension", "got": "a scalar", "cure": "pass x.reshape(1)"}
            raise ShapeError(describe(where or type(self).__name__, **scalar))
        misfit = _misfit(self._stored, tuple(shape))
        if misfit is not None:
            size, axis = misfit.lines[1], "last dimension" if misfit.usage == ROWWISE else "product of the leading dimensions"
            wanted = f"a {axis} divisible by {misfit.format.multiple} for {misfit.usage} {misfit.format} data"
            got, remedy = f"{size} of shape {tuple(shape)}", (cure or _padding)(misfit)
            raise ShapeError(describe(where or type(self).__name__, wanted=wanted, got=got, cure=remedy))

    def _check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        if not self.usages:
            raise QuantizerError(
                describe(type(self).__name__, wanted="a direction", got="none", cure="set rowwise=True or columnwise=True")
            )
        self.check(shape, dtype)

    def _check_update(self, src: torch.Tensor, dst: QuantizedStorage) -> None:
        where = f"{type(self).__name__}.update_quantized"
        if src.shape != dst.shape:
            raise ShapeError(describe(where, wanted=tuple(dst.shape), got=tuple(src.shape), cure="pass a source of that shape"))
        for usage, fmt in zip(USAGES, self.formats):
            if usage in dst.usages and dst.plane(usage).format not in (fmt, fmt.as_stored):
                cure = "update with the quantizer that made the storage, or cast anew"
                got = f"{dst.plane(usage).format} in the {usage} plane"
                raise QuantizerError(describe(where, wanted=fmt, got=got, cure=cure))

    @functools.cached_property
    def _stored(self) -> _LayoutInputs:
        return _stored(self.formats, self.usages, self.optimize_for_gemm)

    @functools.cached_property
    def _why(self) -> str:
        return f"{type(self).__name__} was asked for {' and '.join(self.usages) or 'nothing'} data only"

    def _layouts(self, shape: Sequence[int]) -> tuple[Layout, ...]:
        return _layouts(self._stored, tuple(shape))

    def _storage(self, shape: torch.Size, dtype: torch.dtype, planes: Sequence[Plane]) -> QuantizedStorage:
        by_usage = {plane.usage: plane for plane in planes}
        return QuantizedStorage(shape, dtype, by_usage.get(ROWWISE), by_usage.get(COLUMNWISE), self._why)


@dataclass(frozen=True, kw_only=True, repr=False)
class CastingQuantizer(Quantizer):
    """A quantizer whose planes are encoded: bytes and scales of a matrix, in the layouts of its formats."""

    @abstractmethod
    def _encoding(self, layouts: Sequence[Layout]) -> Encoding:
        """How the planes ``layouts`` are cast."""

    def encoding(self, shape: Sequence[int], dtype: torch.dtype) -> Encoding | None:
        if type(self).quantize is not Quantizer.quantize:
            return None
        self._check(shape, dtype)
        layouts = self._layouts(shape)
        return self._encoding(layouts) if are_known(layouts) else None

    def _planes(self, x: torch.Tensor) -> list[Plane]:
        layouts = self._layouts(x.shape)
        return [plane_of(layout, *arrays) for layout, arrays in zip(layouts, self._encoding(layouts)(x.detach()), strict=True)]

    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        return [zero_plane(layout, device) for layout in self._layouts(shape)]


class Float8CastingQuantizer(CastingQuantizer):
    """A quantizer with one format for both planes, of the element ``fp8_dtype``. QuantizerError for a dtype that is not FP8."""

    fp8_dtype: torch.dtype

    def __post_init__(self) -> None:
        _ = self.formats

    @abstractmethod
    def _format(self, element: Element) -> NumberFormat:
        """The format of ``element``."""

    @functools.cached_property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        require(self.fp8_dtype, FP8_ELEMENTS, f"{type(self).__name__} fp8_dtype")
        made = self._format(FP8_ELEMENTS[self.fp8_dtype])
        return made, made


class RuledQuantizer(CastingQuantizer):
    """A quantizer whose scales follow from the amaxes of blocks by the rule ``scale_rule``, a name of numerics/rules.py."""

    scale_rule: str
    force_pow_2_scales: bool = True

    def __post_init__(self) -> None:
        _ = self._way

    @functools.cached_property
    def _way(self) -> Way:
        where = f"{type(self).__name__} scale_rule"
        return way_of(self.scale_rule, self.formats[0].family, pow2=bool(self.force_pow_2_scales), where=where)

    def _options(self, eps: float = 0.0) -> dict[str, Any] | None:
        """The options with which kernels compute the rule, for a least amax of ``eps``; None if no kernel computes it."""
        carried = self._way.carried.get(bool(self.force_pow_2_scales))
        if carried is None or "pow2" not in carried:
            return None if carried is None else {**carried}
        return {"pow2": carried["pow2"], "eps": max(eps, carried.get("eps", 0.0))}

    @property
    def runs_in_torch(self) -> bool:
        """Whether no kernel casts by this rule: then torch casts, on a GPU too, and fused kernels store what it is to cast."""
        return self._options() is None

    def _by_formula(self, layouts: Sequence[Layout], *, rows: int = 1, eps: float = 0.0) -> Ruled:
        return Ruled(layouts, cast(Formula, self._way.formula), rows=rows, eps=eps)


class Float8RuledQuantizer(RuledQuantizer, Float8CastingQuantizer):
    """One of FP8."""


@dataclass(frozen=True, eq=False)
class _LayoutInputs:
    """What determines the layouts of a quantizer's planes, except for the shape."""

    formats: tuple[NumberFormat, NumberFormat]
    usages: tuple[Usage, ...]
    optimize_for_gemm: bool


_stored = functools.cache(_LayoutInputs)
"""One object for equal fields, so that the caches below, which every cast asks, compare identities."""


@functools.lru_cache(maxsize=4096)
def _layouts(stored: _LayoutInputs, shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """The layouts of the planes of a tensor of ``shape``."""
    matrix = matrix_shape(shape)
    compact = (layout_of(fmt, usage, matrix) for usage, fmt in zip(USAGES, stored.formats) if usage in stored.usages)
    return tuple(layout_of(x.format, x.usage, matrix, stored.optimize_for_gemm and x.tiled) for x in compact)


@functools.lru_cache(maxsize=4096)
def _misfit(stored: _LayoutInputs, shape: tuple[int, ...]) -> Layout | None:
    """The first layout of these planes whose lines are no whole blocks."""
    return next((layout for layout in _layouts(stored, shape) if layout.lines[1] % layout.format.multiple), None)


def _padding(misfit: Layout) -> str:
    return f"pad it to {round_up(misfit.lines[1], misfit.format.multiple)}, or do without the {misfit.usage} plane"


def zero_plane(layout: Layout, device: torch.device | str | None) -> Plane:
    """A plane in ``layout``, of a format that has scales, whose bytes are all 0."""
    scale = torch.zeros(layout.scale_shape, dtype=SCALE_DTYPES[layout.format.scale], device=device)
    amax = None if layout.amax_shape is None else torch.zeros(layout.amax_shape, dtype=torch.float32, device=device)
    return plane_of(layout, torch.zeros(layout.data_shape, dtype=torch.uint8, device=device), scale, amax)


def plane_of(layout: Layout, data: torch.Tensor, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None) -> Plane:
    """The plane whose bytes lie in ``layout``."""
    return Plane(layout.usage, layout.format, layout.shape, data, scale, amax, layout.swizzled)


def require(value: object, known: Collection[object], where: str) -> None:
    """QuantizerError unless ``value`` is one of ``known``."""
    if value not in known:
        wanted = "one of " + ", ".join(map(str, known))
        raise QuantizerError(describe(where, wanted=wanted, got=value, cure="pass one of these"))


# -- whose code a quantizer runs, and whether it makes the same bytes again ------------------------------------------------------


def is_library_code(what: Any) -> bool:
    """Whether a class or a function is the library's."""
    return str(getattr(what, "__module__", "")).startswith("opfuse.")


def parts_of(quantizer: Any) -> Iterator[Any]:
    """The quantizer and, of one that is made of others, these."""
    if is_dataclass(quantizer):
        yield quantizer
        for setting in fields(quantizer):
            yield from parts_of(getattr(quantizer, setting.name))


def is_library_quantizer(quantizer: Any) -> bool:
    """Whether all code of the quantizer is the library's; not if it reduces amaxes, which depends on the ranks at each call."""
    for part in parts_of(quantizer):
        if getattr(part, "with_amax_reduction", False) or getattr(part, "runs_code_of_others", False):
            return False
        if not is_library_code(type(part)):
            return False
    return True


def is_repeatable(quantizer: Any) -> bool:
    """Whether all code is the library's (:func:`is_library_quantizer`), and casts the same to the same: it draws no numbers."""
    for part in parts_of(quantizer):
        if getattr(part, "stochastic_rounding", False):
            return False
    return is_library_quantizer(quantizer)


def casts_itself(quantizer: Any) -> bool:
    """Whether the library's own code casts, which a kernel may then do; for a quantizer made of others, of all of them."""
    for part in parts_of(quantizer):
        quantize = getattr(type(part), "quantize", None)
        if quantize is not None and (not is_library_code(quantize) or getattr(part, "runs_code_of_others", False)):
            return False
    return True


def reduces(quantizer: Any) -> bool:
    """Whether a cast takes the largest amax of several ranks."""
    return any(getattr(part, "with_amax_reduction", False) for part in parts_of(quantizer))
