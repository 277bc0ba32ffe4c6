"""What a module's forward does, written down while it runs on a few rows.

A symbolic value is no tensor: code that asks for a type, a mode or a size would go another way on it than in a call. So the
forward itself runs, on small tensors and its own parameters, and a :class:`TorchFunctionMode` writes each call of torch into a
graph of torch.fx. The recording ends with :class:`NotRecorded` *before* anything happens that a graph cannot show or that would
leave a trace: a function outside of :data:`FUNCTIONS`, a write to a tensor that the forward did not make, a decision by a value,
a dtype or a size. Products of parameters are not computed; zeros of their shape stand for them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from opfuse.convert.code import NotRecorded, check_effects, codes_of
from opfuse.core.operation import FusibleOperation
from opfuse.errors import number_of, with_article
from opfuse.torch_private.dispatch import GRAD_MODE
from opfuse.torch_private.modules import forget_global_hook, has_global_hooks, has_hooks
from opfuse.torch_private.sizes import is_untold, told, untold
from opfuse.torch_private.tensors import base_of, storage_number


class NotOfThisWidth(NotRecorded):
    """A forward fails on inputs of this width, and may not on others."""


# -- what is written down --------------------------------------------------------------------------------------------------------

NAMES = {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg", "concat": "cat"}
NAMES |= {"__rsub__": "rsub", "__rdiv__": "rdiv", "__rtruediv__": "rdiv", "__iadd__": "add_", "__isub__": "sub_"}
NAMES |= {"__imul__": "mul_", "__itruediv__": "div_", "__ipow__": "pow_"}
"""One name for functions that torch has under several."""

_NAMES = "add sub rsub mul div rdiv neg pow square sqrt rsqrt reciprocal exp erf mean"
ARITHMETIC = {*_NAMES.split()}
ACTIVATIONS = {"tanh", "sigmoid", "relu", "silu", "gelu"}
CASTS = {"to", "float", "half", "bfloat16", "double", "type_as"}
VIEWS = {"view", "reshape", "flatten", "unflatten", "contiguous"}
TRANSPOSES = {"t", "T", "mT", "transpose", "permute"}
PARTS = {"chunk", "split", "unbind", "__getitem__", "unsqueeze", "squeeze"}
PRODUCTS = {"linear", "addmm", "matmul", "mm"}
FUNCTIONS = ARITHMETIC | ACTIVATIONS | CASTS | VIEWS | TRANSPOSES | PARTS | PRODUCTS | {"layer_norm", "rms_norm", "dropout"}
"""Functions that depend on nothing but their arguments and change nothing, and dropout, whose mask nobody sees here."""

SIZES = {"shape", "size", "dim", "ndim"}
"""What tells the size of a tensor: numbers that may be calculated with, and not compared."""

OF_SIZES = VIEWS | TRANSPOSES | PARTS | {"layer_norm", "rms_norm"}
"""What a size may be handed to."""


def modes() -> tuple[Any, ...]:
    """The modes of torch that a call depends on: of autograd and autocast."""
    casts = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


class RecordedForward(NamedTuple):
    """A forward that ran.

    nodes: of a graph, in order. Inputs are placeholders, parameters and buffers ``get_attr`` with their names, calls of
    submodules ``call_module``, functions ``call_method`` with a name of :data:`FUNCTIONS`; ``meta`` has the ``shape`` and
    ``dtype`` of a result. The last one reads the result. reads_dtype: the forward asked for the dtype of a tensor, so that it may
    do something else for another one.
    """

    nodes: list[fx.Node]
    reads_dtype: bool


def record(module: nn.Module, given: Mapping[str, Any], *, training: bool, may_write: bool = False) -> RecordedForward:
    """Run the forward of the module's class on ``given``, arguments by name, and write it down. NotRecorded where that ends.

    Runs in the modes of the caller, and not at all if it could do what others notice. may_write: the forward may write to its
    arguments, which are the caller's to give away.
    """
    if has_global_hooks():
        raise NotRecorded("hooks of all modules", "calls without them, while fuse_ runs")
    recorder = _ForwardRecorder(module, given, may_write)
    check_effects(module)
    try:
        with training_or_not(module, training), recorder.calls_followed():
            for part in module.modules():
                if isinstance(part, FusibleOperation):  # which runs plans of its own
                    vars(part)["forward"] = _like_an_activation
            with recorder:
                result = type(module).forward(module, **given)
            return recorder.finish(result)
    except Exception as error:  # whatever a stranger's code raises
        message = str(error).strip().partition("\n")[0]
        raise NotOfThisWidth(f"{type(error).__name__}: {message}", "a forward that runs on tensors of its width") from error


def _like_an_activation(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


class _ForwardRecorder(TorchFunctionMode):
    """Writes the forward of ``module`` down. What submodules do inside is checked, and not written.

    nodes: by the ``id()`` of a tensor. alive: all tensors with a node, so that none gets the ``id()`` of another one. made: the
    tensor for which memory was made in the forward, by memory, which it may write. inside: the submodules that run now. pauses:
    what is called is the recorder's own.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any], may_write: bool) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.reads_dtype = self.reads_size = False
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []
        self.kinds = {kind for part in module.modules() if not (kind := type(part)).__module__.startswith("torch.")}
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.inside: list[nn.Module] = []
        self.pauses = False
        self.thread = get_ident()
        self.modes = modes()
        own = dict((*module.named_parameters(), *module.named_buffers()))
        self.attributes = {id(tensor): name for name, tensor in own.items()}
        self.made = {_memory(each): each for each in given.values() if may_write and isinstance(each, torch.Tensor)}
        for name, each in given.items():
            if isinstance(each, torch.Tensor):
                self._know(each, self.graph.placeholder(name))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
        if name == GRAD_MODE:  # by torch.no_grad() and the like, which end the next call
            return func(*args, **kwargs)
        if name in SIZES:
            self.reads_size = True
            size, of = func(*args, **kwargs), args[1:] or tuple(kwargs.values())
            return _untold(size) if of != (-1,) else untold(size, True, _refused)
        if name == "dtype":
            self.reads_dtype = True
            return func(*args, **kwargs)
        name = NAMES.get(name, name)
        in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
        name = name.rstrip("_") if in_place else name
        if name not in FUNCTIONS or "out" in kwargs:
            raise NotRecorded(f"the call of {name}", "functions that depend on their arguments alone")
        if in_place:
            self._check_write(args[0])
        sizes = list[Any]()
        map_aggregate((args, kwargs), lambda each: sizes.append(each) if is_untold(each) else None)
        if sizes:
            if name not in OF_SIZES:
                _refused()  # as a factor it may be 1 for all sizes that are tried
            args, kwargs = map_aggregate(args, told), map_aggregate(kwargs, told)
        result = _stand_in(name, args, kwargs) if name in ("dropout", *PRODUCTS) else None
        result = func(*args, **kwargs) if result is None else result
        given = {_memory(each) for each in _tensors(args, kwargs)}
        for each in _tensors([result], {}):
            if _memory(each) not in given:
                self.made.setdefault(_memory(each), each)
        if not self.inside:
            self._write(name, args, {key: value for key, value in kwargs.items() if key != "inplace"}, result)
        return result

    def _check_write(self, target: Any) -> None:
        memory = _memory(target)
        if memory not in self.made:
            raise NotRecorded("a write to a tensor that the forward did not make", "a forward that writes to no argument")
        if any(each is not target and _memory(each) == memory for each in self.alive):
            raise NotRecorded("a write to memory that two tensors share", "writes to a tensor that has no views")

    # -- nodes -----------------------------------------------------------------------------------------------------------------

    def _write(self, name: str, args: Any, kwargs: Any, result: Any, op: str = "call_method") -> None:
        taken = map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        node = self.graph.create_node(op, name, *taken)
        if modes() != self.modes:
            got = "a block of other gradients or casts in the forward"
            raise NotRecorded(got, "one mode of autograd and autocast for all of it")
        if isinstance(result, torch.Tensor):
            self._know(result, node)
            return
        if not isinstance(result, (tuple, list)):
            raise NotRecorded(f"what {name} returns, no tensor", "a forward of tensors")
        for index, each in enumerate(result):
            self._know(each, self.graph.call_function(operator.getitem, (node, index)))

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = self.nodes.get(id(value))
        if node is None:
            name = self.attributes.get(id(value))
            if name is None:
                raise NotRecorded("a tensor that is neither an argument nor a parameter", "functions of arguments and parameters")
            node = self.graph.create_node("get_attr", name)
            self._know(value, node)
        return node

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def finish(self, result: Any) -> RecordedForward:
        """The whole, with the result."""
        if not isinstance(result, torch.Tensor):
            raise NotRecorded(f"{with_article(type(result).__name__)} as its result", "one tensor")
        if self.reads_size and any(map(_tells_stand_ins, {code for kind in self.kinds for code in codes_of(kind)})):
            _refused()
        self.graph.output(self._argument(result))
        return RecordedForward([*self.graph.nodes], self.reads_dtype)

    # -- submodules ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def calls_followed(self) -> Iterator[None]:
        """Inside, calls of submodules are seen."""
        hooks = register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, with_kwargs=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
                forget_global_hook(hook.id)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if get_ident() != self.thread:
            return
        if has_hooks(module):
            raise NotRecorded(f"hooks of {with_article(type(module).__name__)}", "submodules without hooks")
        self.inside.append(module)

    def _leave(self, module: nn.Module, args: Any, *given: Any) -> None:
        """given: keyword arguments and the result; in another thread, as the hook is removed, torch leaves out the first."""
        if get_ident() != self.thread:
            return
        kwargs, result = given
        self.inside.pop()
        if not self.inside:
            path = self.paths.get(id(module))
            if path is None:
                got = f"the call of {with_article(type(module).__name__)} that is no submodule"
                raise NotRecorded(got, "calls of submodules")
            self.pauses = True
            try:
                self._write(path, args, kwargs, result, op="call_module")
            finally:
                self.pauses = False


def _memory(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in, the same for all of its views."""
    try:
        number = storage_number(tensor)
    except (NotImplementedError, RuntimeError):  # of a tensor without a storage, such as one of several planes
        number = id(tensor)
    return number


def _stand_in(name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """What stands for a product with a matrix, which may be large, and for a dropout, which draws; None for other arguments."""
    if name == "dropout":
        x, p, training = (*args, *[kwargs[key] for key in ("p", "training")[len(args) - 1 :] if key in kwargs], 0.5, True)[:3]
        stand_in: torch.Tensor = x.clone() if training and p else x
        return stand_in
    if name == "linear":
        x, weight, bias = (*args, kwargs.get("bias"), None)[:3]
        return _product(x, weight.shape[1], weight, weight.shape[0], bias)
    *added, x, weight = args
    if (
        kwargs
        or weight.dim() != 2
        or (name != "matmul" and x.dim() != 2)
        or not (isinstance(weight, nn.Parameter) or base_of(weight) is not None)
    ):
        return None
    return _product(x, weight.shape[0], weight, weight.shape[1], *added)


def _product(x: torch.Tensor, rows: int, weight: torch.Tensor, columns: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Zeros like x W + b, by a product of one element, which has the dtype that autocast gives it."""
    if x.shape[-1] != rows:
        got = f"{number_of(x.shape[-1], 'column')} for a matrix of {number_of(rows, 'row')}"
        raise NotOfThisWidth(got, "products of matrices that fit")
    one = torch.nn.functional.linear(_zeros(x, 1, 1), _zeros(weight, 1, 1), None if bias is None else _zeros(bias, 1))
    return x.new_zeros(*x.shape[:-1], columns, dtype=one.dtype)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    flat = [*args, *kwargs.values()]
    flat += [each for part in flat if isinstance(part, (tuple, list)) for each in part]
    return [each for each in flat if isinstance(each, torch.Tensor)]


WORDS = {"call_module": "the submodule", "placeholder": "the argument", "get_attr": "the tensor"}


def describe_node(node: fx.Node) -> str:
    """A node, in words."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{WORDS.get(node.op, 'the call of')} {target}"


# -- sizes -----------------------------------------------------------------------------------------------------------------------


def _refused() -> NoReturn:
    raise NotRecorded("a size that the forward compares or counts with", "a forward that does the same for all sizes")


def _untold(size: Any) -> Any:
    """Sizes that a forward may hand to torch. What tells their values could be a branch, which no graph shows."""
    if isinstance(size, int):
        return untold(size, False, _refused)
    return _UntoldShape(untold(one, place == len(size) - 1, _refused) for place, one in enumerate(size))


class _UntoldShape(tuple[Any, ...]):
    """Those of a tensor. How many there are could decide as well: not every number is tried in every mode."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _UntoldShape(found) if isinstance(at, slice) else found

    def __add__(self, other: Any) -> Any:
        return _UntoldShape((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return _UntoldShape((*other, *self))

    def _refuse(self, *_: Any) -> NoReturn:
        _refused()

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __mul__ = __rmul__ = _refuse
    __contains__ = __str__ = __repr__ = count = index = numel = _refuse


def _tells_stand_ins(code: CodeType) -> bool:
    """Whether a forward could tell such sizes from those of a call, also by an error that it catches, or count them, which they
    cannot refuse: Python does so itself to unpack them.
    """
    return bool(
        code.co_exceptiontable or {"int", "type", "Size", "SymInt", "len", "hasattr", "getattr"}.intersection(code.co_names)
    )


# -- the arguments and modes of a call -----------------------------------------------------------------------------------------


def required_arguments(module: nn.Module) -> tuple[str, ...]:
    """The arguments that the forward of a module's class cannot do without. All others keep their defaults."""
    try:
        given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except ValueError:  # of a function of C, of which Python knows none
        return ()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each.name for each in given if each.kind in plain and each.default is inspect.Parameter.empty)


LEADING = ((2, 3), (1,), (5, 1, 2))
"""Leading dimensions of the rows that forwards are tried on: counted from either end, none is the same in two of them."""

MODES: Mapping[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
    "training": (True, torch.enable_grad),
    "evaluation": (False, torch.enable_grad),
    "training without gradients": (True, torch.no_grad),
    "evaluation without gradients": (False, torch.no_grad),
    "inference mode": (False, torch.inference_mode),
    "training in inference mode": (True, torch.inference_mode),
}
"""The modes in which a module is called: whether it trains, and what is around the call."""


def rows(leading: tuple[int, ...], width: int, like: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An input of a forward; no leaf, so that it may be written where gradients are on."""
    device = torch.device("cpu") if like is None else like.device
    x = torch.zeros(*leading, width, dtype=dtype or (torch.float32 if like is None else like.dtype), device=device)
    return x.requires_grad_().clone() if torch.is_grad_enabled() else x


@contextmanager
def mode(name: str) -> Iterator[bool]:
    """Inside, torch is in one of :data:`MODES`, whatever is around; yields whether the module trains."""
    training, entered = MODES[name]
    with ExitStack() as left:
        if torch.is_inference_mode_enabled():
            left.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                left.enter_context(torch.autocast(kind, enabled=False))
        left.enter_context(entered())
        yield training


def recordings(
    module: nn.Module, widths: Mapping[str, int], dtypes: Sequence[torch.dtype | None] = (None,), *, may_write: bool = False
) -> Iterator[tuple[str, bool, Callable[[], RecordedForward]]]:
    """Every way in which a forward may be called: the mode, whether torch.autocast is on, and what records it, inside of these.

    Inputs have the dtype and the device of the first parameter; in the first mode also all of ``dtypes``, as its parameters do
    then, and all leading dimensions. may_write: as in :func:`record`.
    """
    like = first_parameter(module)
    kind = "cpu" if like is None else like.device.type

    def run(leading: tuple[int, ...], dtype: torch.dtype | None = None) -> RecordedForward:
        given = {argument: rows(leading, width, like, dtype) for argument, width in widths.items()}
        return record(_of_dtype(module, dtype), given, training=training, may_write=may_write)

    for number, name in enumerate(MODES):
        ways = [(at, dtype) for dtype in dtypes for at in LEADING]
        with mode(name) as training:
            for way in ways[: 1 if number else None]:
                yield name, False, partial(run, *way)
            if torch.amp.autocast_mode.is_autocast_available(kind):
                with torch.autocast(kind, dtype=torch.bfloat16):
                    yield name, True, partial(run, LEADING[0])


def first_parameter(module: nn.Module) -> torch.Tensor | None:
    """The first parameter of floats; None if there is none."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _of_dtype(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module, or a shallow copy of it with parameters of another dtype."""
    if dtype is None or not module._parameters:
        return module
    copy: nn.Module = module.__new__(type(module))
    cast = {name: p if p is None else nn.Parameter(p.detach().to(dtype)) for name, p in module._parameters.items()}
    vars(copy).update({**vars(module), "_parameters": cast})
    return copy


@contextmanager
def training_or_not(module: nn.Module, training: bool) -> Iterator[None]:
    """Inside, the module and all in it train or do not; afterwards their attributes are what they were."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        for part, _ in before:
            vars(part)["training"] = training
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
