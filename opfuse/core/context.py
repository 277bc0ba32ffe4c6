"""The context of one op in one call: its operands on the way forward, its saved state on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from opfuse.core.protocol import check_tensor, checked_tensors
from opfuse.core.signature import Env
from opfuse.errors import MissingSavedError, SavedTensorError, describe
from opfuse.recipes.recipe import KEPT_INPUT
from opfuse.tensors.quantizers.base import INPUT_DTYPES
from opfuse.tensors.row_collectives import PlaneTransfer
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.tensors import version_of

Value = torch.Tensor | QuantizedStorage
"""What travels along an edge of a pipeline."""


def plain(value: Value) -> torch.Tensor:
    """``value`` in high precision."""
    return value.dequantize(value.dtype) if isinstance(value, QuantizedStorage) else value


def plain_or_none(value: Value | None) -> torch.Tensor | None:
    """``value`` in high precision, if there is one."""
    return None if value is None else plain(value)


def values_of(x: Value) -> torch.Tensor:
    """An input, or what was saved of it, as kernels take it: dequantized; the caller saves a quantized tensor as it came."""
    if isinstance(x, QuantizedTensor):
        return x.detach().dequantize()
    return x.dequantize(x.dtype) if isinstance(x, QuantizedStorage) else x


def in_memory(value: Any) -> Any:
    """``value``; of a tensor with torch's negative bit a copy without it, since kernels read what lies in memory."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


class SavedValues:
    """What a forward pass kept for the backward pass of ``op``, by name."""

    def __init__(self, op: Any, values: Mapping[str, Value | None]) -> None:
        vars(self).update(values, _op=op)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        op, kept = self._op, tuple(vars(self).keys() - {"_op"})
        cure = f"have the op_forward that ran call ctx.save({name}=...), or give {type(op).__name__} an op_backward of its own"
        raise MissingSavedError(describe(f"{op.label} backward", wanted=f"a saved {name!r}", got=kept or "nothing", cure=cure))


class Context:
    """Passed to ``op_forward`` and later, with the saved state, to ``op_backward``.

    op: the live op. env: the call's environment. needs: what wants a gradient: ``"input"``, parameter names, ``"extra0"`` …;
    empty when nothing does. operands: side inputs by name (a quantized weight). extras: extra inputs. rematerialized: operands,
    by role, that are not saved, since the backward pass makes them anew. is_remade: whether it makes the op's result anew, from
    what the op saves. transfer: for a collective, which planes of a quantized input travel in which pass; None: values travel.
    cast_there: how what goes to experts on other ranks is cast there for a grouped product, if nothing else is done to it before.
    dirty: tensors of the caller that the op changed in place. grad_extras: gradients of the op's extra outputs. grad_output: the
    gradient of its output in high precision, where ``op_backward`` gets a cast of it in groups. reader: of a cast of a gradient
    in groups, the context of the op that reads it. extra_outputs: the op's extra outputs, if a rule ran it. An op may set further
    attributes on it; plain Python values only, tensors go through :meth:`save`.

    Beside the saved values, the backward pass of a built-in op finds here, whether the op itself or a rule ran the forward pass:
    ``input_dtype``, ``input_shape``, ``extra_dtypes``, and ``compute_dtype``, in which the op computes, also under the names
    ``io_dtype`` and ``dtype``. One that was not set follows from the input (:data:`_DERIVED`). Further names, and the functions
    that find them, are listed by an op's class in ``derives``.
    """

    def __init__(self, op: Any, env: Env, needs: frozenset[str]) -> None:
        self.op = op
        self.env = env
        self.needs = needs
        self.operands: dict[str, Value] = {}
        self.extras: tuple[Any, ...] = ()
        self.casts: Mapping[str, Any] = {}
        self.rematerialized: frozenset[str] = frozenset()
        self.is_remade = False
        self.transfer: PlaneTransfer | None = None
        self.cast_there: Any = None
        self.dirty: list[torch.Tensor] = []
        self.grad_output: torch.Tensor | None = None
        self.reader: Context | None = None
        self.grad_extras: tuple[torch.Tensor | None, ...] = ()
        self.grad_params: tuple[torch.Tensor | None, ...] = ()
        self.grad_inputs: tuple[torch.Tensor | None, ...] = ()
        self.extra_outputs: tuple[torch.Tensor, ...] = ()
        self._input_shape: torch.Size | None = None
        self._input_dtype: torch.dtype | None = None
        self._before: Context | None = None
        self._saved: dict[str, Value | None] = {}
        self._versions: list[int] = []

    if TYPE_CHECKING:  # ops may set attributes of their own

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    else:

        def __getattr__(self, name: str) -> Any:
            derived = _DERIVED.get(name) or (None if name in _OWN else self.op.derives.get(name))
            if derived is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return derived(self)

    @property
    def requires_grad(self) -> bool:
        """Whether this op takes part in the backward pass."""
        return bool(self.needs)

    @property
    def spec(self) -> Any:
        """The op's frozen hyper-parameters."""
        return self.op.spec

    def dtype_of(self, x: Value) -> torch.dtype:
        """The dtype in which the op computes on ``x``."""
        dtype: torch.dtype = self.op.compute_dtype(self.env, x)
        return dtype

    def cast(self, role: str, x: Value, *by: Any) -> Value:
        """``x`` quantized for ``role`` where a user's fused op took over the op's cast; else ``x`` as it is.

        by: further arguments of the cast: for a cast in groups, the rows of each.
        """
        cast = self.casts.get(role)
        return x if cast is None else cast(x, *by)

    def keeps_codes(self, x: torch.Tensor) -> bool:
        """Whether the recipe's ``keep`` has an activation or a norm save codes of ``x``: not where no cast takes it, nor of rows
        so narrow that codes and a scale are no fewer bytes.
        """
        if self.env.keep != "quantized" or isinstance(x, QuantizedTensor) or not x.dim() or x.dtype not in INPUT_DTYPES:
            return False
        return x.shape[-1] + torch.float32.itemsize < x.shape[-1] * x.dtype.itemsize

    def kept_input(self, x: torch.Tensor) -> Value:
        """``x`` as the recipe's ``keep`` has an activation or a norm save it."""
        keeps = self.env.keep == "quantized" and self.keeps_codes(x)  # every activation of every call asks the first
        return KEPT_INPUT.quantize(x) if keeps else x

    def save(self, **values: Value | None) -> None:
        """Keep named values for the backward pass. SavedTensorError unless the names are the ones the op declares."""
        declared = self.op.saves
        if declared is None or set(values) != set(declared):
            where, wanted = f"{self.op.label} saved state", f"exactly {declared}"
            cure = "list every saved name in the class attribute `saves`; pass None for what no gradient needs"
            raise SavedTensorError(describe(where, wanted=wanted, got=tuple(values), cure=cure))
        if self._saved:
            values |= {name: value for name, value in self._saved.items() if name.isdigit()}
        self._store(values)

    def set_grads(self, *, params: Iterable[torch.Tensor | None] = (), extras: Iterable[torch.Tensor | None] = ()) -> None:
        """Leave the gradients of the op's parameters and of its extra inputs. PipelineError for what is no tuple of tensors."""
        self.grad_params = checked_tensors(self.op, "gradients of parameters", params)
        self.grad_inputs = checked_tensors(self.op, "gradients of extra inputs", extras)

    def set_extra_outputs(self, *values: torch.Tensor) -> None:
        """Leave the op's extra outputs, from a rule that runs it. PipelineError for anything but tensors."""
        for value in values:
            check_tensor(self.op, "extra outputs", value, "pass each of them, in order")
        self.extra_outputs = values

    @property
    def saved(self) -> SavedValues:
        """The saved values by name. MissingSavedError for a name under which the forward pass kept nothing."""
        return SavedValues(self.op, self._saved)

    def save_for_backward(self, *values: Value | None) -> None:
        """Keep unnamed tensors for the backward pass, as ``torch.autograd.Function`` contexts do.

        Named values stay, so a subclass can add to what its base has saved.
        """
        named = {name: value for name, value in self._saved.items() if not name.isdigit()}
        self._store(named | {str(i): value for i, value in enumerate(values)})

    @property
    def saved_tensors(self) -> tuple[Value | None, ...]:
        """What :meth:`save_for_backward` kept."""
        return tuple([value for name, value in self._saved.items() if name.isdigit()])

    def complete(self) -> bool:
        """Whether the op's own backward can run on what was saved; if so, it is kept under the declared names, the rest as None.

        Unnamed values take the names that the op declares, in order, if there are as many. A value that no gradient reads may be
        missing or None, and so may a parameter of the op.
        """
        op, saved = self.op, self._saved
        own = [name for name in op.saves if name not in op.parameter_names]
        read = {*own}.intersection(op.reads_saved(self))
        if {name for name in saved if not name.isdigit()} == {*op.saves}:
            return not op.knows_reads or all(saved[name] is not None for name in read)
        if list(saved) == [str(i) for i in range(len(saved))]:
            names = next((names for names in (op.saves, own) if len(names) == len(saved)), ())
            saved = dict(zip(names, saved.values())) if names else saved
        if not saved.keys() <= {*op.saves} or any(name not in saved or (op.knows_reads and saved[name] is None) for name in read):
            return False
        parameters = dict(zip(op.parameter_names, op.parameter_values()))
        self._store({name: saved.get(name, parameters.get(name)) for name in op.saves})
        return True

    def _store(self, values: dict[str, Value | None]) -> None:
        self._saved = values
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return versions(*self._saved.values()) if self.needs and self._saved else []

    # -- what the executor does with the saved state -------------------------------------------------------------------

    def saved_state(self) -> dict[str, Value | None]:
        """Named saved values, for inspection."""
        return dict(self._saved)

    def release(self) -> list[torch.Tensor]:
        """Hand the saved tensors over, in a fixed order, so that autograd alone owns them; only their structure stays.

        SavedTensorError if one of them was written since: autograd counts writes only from here on.
        """
        if self._versions != self._versions_now():
            where, wanted = f"{self.op.label} saved state", "tensors that stay as they were saved"
            got = "one that a later op of the pipeline changed in place"
            cure = "clone the extra tensor that the op with in_place=True writes to, or use in_place=False"
            raise SavedTensorError(describe(where, wanted=wanted, got=got, cure=cure))
        tensors: list[torch.Tensor] = []
        for name, value in self._saved.items():
            parts = _tensors(value)
            tensors += parts
            if isinstance(value, QuantizedStorage):
                self._saved[name] = value.with_tensors([_RELEASED] * len(parts))
            elif value is not None:
                self._saved[name] = _RELEASED
        self.operands, self.extras, self.extra_outputs, self.dirty = {}, (), (), []
        return tensors

    def restored(self, tensors: Iterator[torch.Tensor]) -> Context:
        """A copy that holds saved tensors again, taken from ``tensors`` in the order of :meth:`release`."""
        copy = Context.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._saved = {name: _refill(value, tensors) for name, value in self._saved.items()}
        return copy

    def parts(self) -> list[torch.Tensor]:
        """The tensors of the saved values, in the order of :meth:`release`."""
        return [part for value in self._saved.values() for part in _tensors(value)]

    def fingerprint(self) -> tuple[Any, ...] | None:
        """What a backward pass reads here, once it is released, beside tensors and what the plan says: to be compared.

        None where that is more than plain values and tensors in planes.
        """
        try:
            saved = [(name, value is _RELEASED or identity(value)) for name, value in self._saved.items()]
            left = [(name, identity(vars(self)[name])) for name in sorted(vars(self).keys() - _GIVEN)]
        except KeyError:
            return None
        return self._input_shape, self._input_dtype, self.rematerialized, *saved, *left

    def forget(self) -> None:
        """Let go of the saved values, once the op's backward is over: their memory serves what comes after it."""
        self._saved = {}


def _input_dtype(ctx: Context) -> torch.dtype:
    """The dtype of the input; inside a fused op, the dtype that the op before it produces."""
    if ctx._input_dtype is not None:
        return ctx._input_dtype
    before = _known(ctx, "input_dtype", ctx._before)
    keeps = not {"view", "transparent"}.isdisjoint(before.op.traits)
    dtype: torch.dtype = before.input_dtype if keeps else before.compute_dtype
    return dtype


def _compute_dtype(ctx: Context) -> torch.dtype:
    return ctx.dtype_of(torch.empty(0, dtype=ctx.input_dtype, device="cpu"))


def _known(ctx: Context, name: str, value: Any) -> Any:
    """``value``; SavedTensorError if it is None: then only the fused op that ran the forward pass knows it."""
    if value is not None:
        return value
    where, got = f"{ctx.op.label} {name}", "nothing, where a fused op ran the forward pass"
    cure = f"set ctx.{name} in the fuser_forward of that op, or give it a fuser_backward"
    raise SavedTensorError(describe(where, wanted="what the op's own forward pass knows", got=got, cure=cure))


_DERIVED: Mapping[str, Callable[[Context], Any]] = {
    "input_dtype": _input_dtype,
    "input_shape": lambda ctx: _known(ctx, "input_shape", ctx._input_shape),
    "compute_dtype": _compute_dtype,
    "io_dtype": _compute_dtype,
    "dtype": _compute_dtype,
    "extra_dtypes": lambda ctx: (ctx.compute_dtype,) * ctx.op.num_extra_inputs,
}
"""What follows from the op's input, by the name under which the op's own forward pass sets it."""

_OWN = frozenset(("op", "__dict__", "__getstate__", "__setstate__"))
"""Names that Python looks up on a context before it has an op, while it is copied."""

_GIVEN = frozenset(vars(Context(None, cast(Any, None), frozenset())))
"""Names that every context has: what an op or a rule leaves in another one is its own."""

_IDENTITIES: Mapping[type, Callable[[Any], Any]] = {
    **dict.fromkeys((int, bool, str, type(None), torch.dtype, torch.Size, torch.device), lambda value: value),
    **dict.fromkeys((tuple, list), lambda values: tuple(map(identity, values))),
    float: float.hex,
    Plane: lambda plane: (plane.usage, plane.format, plane.shape, plane.scale is None, plane.amax is None, plane.swizzled),
    QuantizedStorage: lambda value: (value.shape, value.dtype, identity(value.rowwise), identity(value.columnwise)),
}


def identity(value: Any) -> tuple[type, Any]:
    """What is equal for two plain values that are the same; KeyError for any other."""
    return type(value), _IDENTITIES[type(value)](value)


def fingerprint_of(contexts: Iterable[Context]) -> tuple[Any, ...] | None:
    """What ``contexts`` and those before them tell; None if one of them does not."""
    read = dict.fromkeys(contexts)
    waiting = [*read]
    while waiting:
        before = waiting.pop()._before
        if before is not None and before not in read:
            read[before] = None
            waiting.append(before)
    fingerprints = [Context.fingerprint(context) for context in read]  # an op may have left something of its own under that name
    return None if None in fingerprints else tuple(fingerprints)


_RELEASED = torch.empty(0, device="cpu")


def versions(*values: Value | None) -> list[int]:
    """How often each tensor of ``values`` was written, as autograd counts; 0 for those of inference mode, which do not count."""
    try:
        return [*map(version_of, values)]  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):  # a value of several tensors, or of none; one that does not count
        tensors = [tensor for value in values for tensor in _tensors(value)]
        return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _tensors(value: Value | None) -> tuple[torch.Tensor, ...]:
    if isinstance(value, QuantizedStorage):
        return value.tensors()
    return () if value is None else (value,)


def _refill(value: Value | None, tensors: Iterator[torch.Tensor]) -> Value | None:
    if isinstance(value, QuantizedStorage):
        return value.with_tensors([next(tensors) for _ in value.tensors()])
    return next(tensors) if value is _RELEASED else value
