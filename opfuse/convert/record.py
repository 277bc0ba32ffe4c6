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
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from threading import get_ident
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from opfuse.core.operation import FusibleOperation
from opfuse.torch_private.dispatch import GRAD_MODE
from opfuse.torch_private.modules import forget_global_hook, has_global_hooks, has_hooks
from opfuse.torch_private.operations import tree_leaves
from opfuse.torch_private.tensors import base_of, storage_number


class NotRecorded(BaseException):
    """A forward does what cannot be written down. got: what. wanted: what a forward that can be has there.

    No ``Exception``, which a forward may catch to do something else.
    """

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(got, wanted)
        self.got, self.wanted = got, wanted


class NotOfThisWidth(NotRecorded):
    """A forward fails on inputs of this width, and may not on others."""


# -- what is written down --------------------------------------------------------------------------------------------------------

NAMES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "__rsub__": "rsub",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__ipow__": "pow_",
    "concat": "cat",
}
"""One name for functions that torch has under several."""

ARITHMETIC = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "rdiv",
    "neg",
    "pow",
    "square",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "erf",
    "mean",
}
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


def _modes() -> tuple[Any, ...]:
    casts = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


@dataclass
class RecordedForward:
    """A forward that ran.

    graph: inputs are placeholders, parameters and buffers ``get_attr`` with their names, calls of submodules ``call_module``,
    functions ``call_method`` with a name of :data:`FUNCTIONS`; ``meta`` has the ``shape`` and ``dtype`` of a result, and the
    ``modes`` of autograd and autocast in which it was made. reads_dtype: the forward asked for the dtype of a tensor, so that it
    may do something else for another one. writes: it writes to its first argument. ended: why it was not recorded to its end.
    modes: those around it. returned: what is among its results, if it ran to its end.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    reads_dtype: bool = False
    writes: bool = False
    ended: NotRecorded | None = None
    modes: tuple[Any, ...] = field(default_factory=_modes)
    returned: list[fx.Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes in order."""
        return list(self.graph.nodes)

    @property
    def changes_modes(self) -> bool:
        """Whether parts of it ran in other modes of autograd or autocast, as inside of ``torch.no_grad()``."""
        return any(node.meta.get("modes", self.modes) != self.modes for node in self.graph.nodes)


def record(module: nn.Module, given: Mapping[str, Any], *, training: bool, may_write: bool = False) -> RecordedForward:
    """Run the forward of the module's class on ``given``, arguments by name, and write it down as far as it can be followed.

    Runs in the modes of the caller. The attributes of the module and of all inside it, and the states of random generators, are
    what they were afterwards. may_write: the forward may write to its arguments, which are the caller's to give away.
    """
    recorder = _ForwardRecorder(module, given, may_write)
    found, numpys = recorder.found, np.random.get_state()
    states = random_states(numpys)
    if has_global_hooks():
        found.ended = NotRecorded("hooks of all modules", "calls without them, while fuse_ runs")
        return found
    try:
        with restored(module) as changed, recorder.calls_followed():
            for part in module.modules():
                vars(part)["training"] = training
                if isinstance(part, FusibleOperation):  # which runs plans of its own
                    vars(part)["forward"] = _like_an_activation
            with recorder:
                result = type(module).forward(module, **given)
            recorder.finish(result)
            del result
            names = [name for name in changed() if name.rpartition(".")[2] not in ("training", "forward")]
    except NotRecorded as error:
        found.ended = error
        return found
    except Exception as error:  # whatever a stranger's code raises
        text = str(error).strip().partition("\n")[0]
        found.ended = NotOfThisWidth(f"{type(error).__name__}: {text}", "a forward that runs on tensors of its width")
        return found
    finally:
        if drawn := random_states() != states:  # not from torch's, of which no function that runs draws
            random.setstate(states[1])
            np.random.set_state(numpys)
    if drawn:
        found.ended = NotRecorded("random numbers that the forward draws", "a forward that does the same at each call")
    elif stored := [f"self.{name}" for name in names] or recorder.still_alive():
        found.ended = NotRecorded(f"{', '.join(stored)}, which the forward keeps", "a forward that leaves nothing but its result")
    elif found.changes_modes:
        got = "a block of other gradients or casts in the forward"
        found.ended = NotRecorded(got, "one mode of autograd and autocast for all of it")
    return found


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
        self.found = RecordedForward()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.inside: list[nn.Module] = []
        self.pauses = False
        self.thread = get_ident()
        self.given = [each for each in given.values() if isinstance(each, torch.Tensor)]
        own = dict((*module.named_parameters(), *module.named_buffers()))
        self.attributes = {id(tensor): name for name, tensor in own.items()}
        self.inputs = {_memory(tensor) for tensor in self.given}
        self.made = dict.fromkeys(self.inputs) if may_write else {}
        for name, each in given.items():
            if isinstance(each, torch.Tensor):
                self._know(each, self.found.graph.placeholder(name))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
        if name == GRAD_MODE:  # by torch.no_grad() and the like; nodes tell their modes
            return func(*args, **kwargs)
        if name in SIZES:
            return _uncompared(func(*args, **kwargs))
        if name == "dtype":
            self.found.reads_dtype = True
            return func(*args, **kwargs)
        name = NAMES.get(name, name)
        in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
        name = name.rstrip("_") if in_place else name
        if name not in FUNCTIONS or "out" in kwargs:
            map_aggregate((args, kwargs), self._mark_read)  # type: ignore[arg-type]
            raise NotRecorded(f"the call of {name}", "functions that depend on their arguments alone")
        if in_place:
            self._check_write(args[0])
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
        self.found.writes |= memory in self.inputs

    def _mark_read(self, value: Any) -> Any:
        """Note that something reads a value, although it cannot be written down."""
        if isinstance(value, torch.Tensor) and id(value) in self.nodes:
            self.nodes[id(value)].meta["read"] = True
        return value

    # -- nodes -----------------------------------------------------------------------------------------------------------------

    def _write(self, name: str, args: Any, kwargs: Any, result: Any, op: str = "call_method") -> None:
        taken = map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        node = self.found.graph.create_node(op, name, *taken)  # type: ignore[arg-type]
        node.meta["modes"] = _modes()
        if isinstance(result, torch.Tensor):
            self._know(result, node)
            return
        if not isinstance(result, (tuple, list)):
            raise NotRecorded(f"what {name} returns, no tensor", "a forward of tensors")
        for index, each in enumerate(result):
            self._know(each, self.found.graph.call_function(operator.getitem, (node, index)))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return operator.index(value)
        if not isinstance(value, torch.Tensor):
            return value
        node = self.nodes.get(id(value))
        if node is None:
            name = self.attributes.get(id(value))
            if name is None:
                raise NotRecorded("a tensor that is neither an argument nor a parameter", "functions of arguments and parameters")
            node = self.found.graph.create_node("get_attr", name)
            self._know(value, node)
        return node

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def finish(self, result: Any) -> None:
        """Write the result down."""
        if any(vars(each) for each in self.alive if id(each) not in self.attributes):
            raise NotRecorded("attributes of a tensor", "a forward that assigns none to tensors")
        self.found.returned = [self.nodes[id(each)] for each in tree_leaves(result) if id(each) in self.nodes]
        if not isinstance(result, torch.Tensor):
            raise NotRecorded(f"a {type(result).__name__} as its result", "one tensor")
        self.found.graph.output(self._argument(result))

    def still_alive(self) -> list[str]:
        """Values that live on although nobody has the result: the forward has put them somewhere."""
        told = [(weakref.ref(tensor), self.nodes[id(tensor)]) for tensor in self.alive if id(tensor) not in self.attributes]
        kept = {id(tensor) for tensor in self.given}
        self.made = {}
        told = [(ref, node) for ref, node in told if id(ref()) not in kept]
        self.alive = []
        return [describe_node(node) for ref, node in told if ref() is not None]

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
            raise NotRecorded(f"hooks of a {type(module).__name__}", "submodules without hooks")
        self.inside.append(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if get_ident() != self.thread:
            return
        self.inside.pop()
        if not self.inside:
            path = self.paths.get(id(module))
            if path is None:
                raise NotRecorded(f"the call of a {type(module).__name__} that is no submodule", "calls of submodules")
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
        return x.clone() if training and p else x
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
        raise NotOfThisWidth(f"{x.shape[-1]} columns for a matrix of {rows} rows", "products of matrices that fit")
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


class _Uncompared(int):
    """A size. It may be calculated with and handed to torch; what tells its value could be a branch, which no graph shows."""


def _calculating(name: str) -> Callable[..., Any]:
    def calculate(self: int, *others: int) -> Any:
        result = getattr(int, name)(operator.index(self), *map(operator.index, others))
        return _Uncompared(result) if isinstance(result, int) else result

    return calculate


def _refused(self: int, *others: Any) -> NoReturn:
    raise NotRecorded("a size that the forward compares", "a forward that does the same for all sizes")


CALCULATIONS = {f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")} | {"__neg__"}
OF_OBJECTS = {*vars(object)} - {
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__str__",
    "__repr__",
    "__format__",
}

for _name in sorted(
    vars(int).keys() - OF_OBJECTS - {"__new__", "__index__", "__getnewargs__", "real", "imag", "numerator", "denominator"}
):
    setattr(_Uncompared, _name, _calculating(_name) if _name in CALCULATIONS else _refused)


def _uncompared(size: Any) -> Any:
    return _Uncompared(size) if isinstance(size, int) else tuple(map(_Uncompared, size))


# -- the arguments and modes of a call -----------------------------------------------------------------------------------------


def required_arguments(module: nn.Module) -> tuple[str, ...]:
    """The arguments that the forward of a module's class cannot do without. All others keep their defaults."""
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each.name for each in given if each.kind in plain and each.default is inspect.Parameter.empty)


LEADING = ((2, 3), (3,), (2, 1, 3))
"""Leading dimensions of the rows that forwards are tried on."""

MODES: Mapping[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
    "training": (True, torch.enable_grad),
    "evaluation": (False, torch.enable_grad),
    "training without gradients": (True, torch.no_grad),
    "evaluation without gradients": (False, torch.no_grad),
    "inference mode": (False, torch.inference_mode),
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


# -- what is as it was -----------------------------------------------------------------------------------------------------------

CONTAINERS = (list, dict, set, deque)
"""What a forward may keep values in, as an attribute or inside of another one."""


class _Attributes:
    """The attributes of a module as they were, with what containers in them held."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self.module, self.prefix = module, prefix
        self.values = dict(vars(module))
        containers = [(name, value) for name, value in self.values.items() if isinstance(value, CONTAINERS)]
        self.held = [(name, each, _parts(each)) for name, value in containers for each in _containers(value)]

    def changed(self) -> Iterator[str]:
        """Names of attributes that were assigned, deleted or written to."""
        now, before = vars(self.module), self.values
        written = {name for name, each, parts in self.held if not _holds(each, parts)}
        for name in dict.fromkeys((*before, *now)):
            if name in written or name not in now or name not in before or now[name] is not before[name]:
                yield f"{self.prefix}{name}"

    def restore(self) -> None:
        """Have all attributes and containers what they had."""
        for _, each, parts in self.held:
            if not _holds(each, parts):
                each.clear()
                fill = each.update if isinstance(each, (dict, set)) else each.extend
                fill(zip(parts[::2], parts[1::2]) if isinstance(each, dict) else parts)
        vars(self.module).clear()
        vars(self.module).update(self.values)


def _containers(value: Any, seen: tuple[int, ...] = ()) -> Iterator[Any]:
    """``value`` and what it holds, as far as these are containers."""
    if isinstance(value, CONTAINERS) and id(value) not in seen:
        yield value
        for each in (value.values() if isinstance(value, dict) else value) if value else ():
            yield from _containers(each, (*seen, id(value)))


def _parts(container: Any) -> tuple[Any, ...]:
    """Keys and values of a dictionary in turn, the parts of another container."""
    if not container:  # as most are
        return ()
    return tuple(chain.from_iterable(container.items())) if isinstance(container, dict) else tuple(container)


def _holds(container: Any, parts: tuple[Any, ...]) -> bool:
    """Whether a container has the same objects in the same order."""
    now = _parts(container)
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


@contextmanager
def restored(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """After the block, attributes of the module and of all inside it are what they were, and what containers in them hold.

    Yields a function that returns the names of those that were assigned or written to since.
    """
    parts = [_Attributes(part, f"{name}." * bool(name)) for name, part in module.named_modules()]
    try:
        yield lambda: [name for part in parts for name in part.changed()]
    finally:
        for part in parts:
            part.restore()


def random_states(numpys: Any = None) -> tuple[Any, ...]:
    """The states of the host's random generators, which are equal as long as nobody draws. numpys: that of NumPy, if known."""
    _, numbers, *rest = np.random.get_state() if numpys is None else numpys
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(numbers).tobytes(), rest
