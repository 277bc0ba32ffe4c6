"""``opfuse.graphed_step``: a whole training step, its optimizer included, as one CUDA graph.

A graph repeats what the device did, and none of the Python around it. So what Python would have decided is compared before each
replay: what the graph has fixed is a :class:`Fixed`, and a step for which another one holds runs as it is written.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import opfuse
from opfuse.compiler.registry import active_rules
from opfuse.core.watched import Tree, WatchedModule
from opfuse.errors import OpfuseError, OpfuseWarning, PipelineError, UnsupportedError, describe, notice
from opfuse.events import listeners
from opfuse.recipes.autocast import in_region
from opfuse.runtime.graphs import check_module
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.torch_private.autograd import hooked
from opfuse.torch_private.dispatch import active_modes
from opfuse.torch_private.modules import has_global_hooks, hooks_of
from opfuse.torch_private.operations import copy_each, tree_leaves, tree_map
from opfuse.torch_private.tensors import version_of

WHERE = "opfuse.graphed_step"

WARM = 3
"""Steps of each shape before it is captured: the first makes plans and compiles kernels, the second records the forward pass and
the third the backward pass."""

_BESIDE = "thread_local"
"""Other threads may allocate during a capture, as one that pins the memory of a DataLoader's batches does."""

_OURS = tuple(directory for package in (torch, opfuse) for directory in package.__path__)
"""Where code lies that a user did not write."""

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
"""What an argument may be beside a tensor: a graph is for one value of it."""


class Fixed(NamedTuple):
    """What a graph has fixed of the step beside its arguments, by what it is called."""

    parameters: list[Any]
    modules: list[Any]
    settings: list[Any]
    states: list[Any]
    ops: int
    rules: str
    torch: tuple[Any, ...]


_ABOUT = {
    "parameters": "parameters or buffers lie in other memory, or want gradients otherwise",
    "modules": "modules are others, are in another mode (train, eval), or fuse_ has given them another forward",
    "settings": "settings of an optimizer are others, as its learning rate",
    "states": "states of an optimizer lie in other memory",
    "ops": "ops of opfuse, or their settings, are others",
    "rules": "fusion rules are others",
    "torch": "torch.no_grad or torch.autocast is on where it was off, or the reverse",
}
"""What has happened when a field differs."""

_OFTEN = {
    "settings": "let a setting that changes at each step be a tensor on the GPU, into which schedulers write: "
    "AdamW(..., lr=torch.tensor(1e-3, device='cuda'), capturable=True)",
}
_SELDOM = "none, if it is to be so: the step is captured again. Else leave it as it was"


def graphed_step(step: Callable[..., Any], *parts: nn.Module | Optimizer) -> GraphedStep:
    """``step`` as a CUDA graph: forward passes, backward passes and, if they are in it, clipping and the optimizer's step.

    ``parts``: all modules and optimizers that the step uses. ::

        def train(tokens, labels):
            with opfuse.autocast(recipe=recipe):  # not for a model that fuse_ has converted
                loss = loss_of(model(tokens), labels)
            loss.backward()
            optimizer.step()  # of AdamW(..., fused=True, capturable=True)
            optimizer.zero_grad()
            return loss

        step = opfuse.graphed_step(train, model, optimizer)
        for tokens, labels in batches:
            loss = step(tokens, labels)

    Every call is one step. The first three of each shape run as they are written, the fourth is captured, and from then on the
    device repeats it. Arguments are CUDA tensors, in lists, tuples and dictionaries too, which are copied into memory of the
    graph, and plain values, for each of which there is a graph. Results are copies, detached from autograd. Graphs of all shapes
    share their memory, which is that of the largest step.

    A call finds gradients as None: zero them at the end of the step, or, if the optimizer steps outside, before the next call.
    Gradients that a step leaves lie where those of the step before lay.

    Before each replay the call compares what the graph has fixed (:data:`_ABOUT`). If something has changed, graphs are dropped
    with an OpfuseWarning that says what, and the step is warmed up and captured again. The step runs as it is written while
    somebody listens (:func:`opfuse.explain`, a mode of torch's dispatcher) and, with an OpfuseWarning, if a module has hooks, as
    under :func:`opfuse.watch`. Other effects of Python code, as ``print`` or a counter, happen in these calls and in the capture,
    but not in a replay. What the step reads beside arguments and ``parts`` keeps its value.

    UnsupportedError for what a graph cannot hold: code that waits for the device (``loss.item()``; the error comes in the fourth
    call and names the line), an optimizer that counts or keeps a setting on the CPU, a scheduler inside of the step, parameters
    in shards, a machine without a GPU. PipelineError for ``parts`` of another kind, and for a call that finds gradients.
    """
    if not callable(step):
        raise PipelineError(describe(WHERE, wanted="a function", got=type(step).__name__, cure="pass the function of one step"))
    wrong = next((part for part in parts if not isinstance(part, (nn.Module, Optimizer))), None)
    if wrong is not None or not any(isinstance(part, nn.Module) for part in parts):
        got = "no module" if wrong is None else f"a {type(wrong).__name__}"
        cure = "pass all that the step uses: graphed_step(step, model, optimizer)"
        raise PipelineError(describe(WHERE, wanted="modules and optimizers behind the step", got=got, cure=cure))
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return GraphedStep(step, modules, [part for part in parts if isinstance(part, Optimizer)])


class GraphedStep:
    """A step that :func:`graphed_step` repeats. graphs: how many there are. replays: how many steps the device has repeated."""

    def __init__(self, step: Callable[..., Any], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        for module in modules:
            check_module(WHERE, module)
        self._step = step
        self._parts = _Parts(modules, optimizers)
        self._device = _device_of(self._parts.parameters())
        self._stream = torch.cuda.Stream(self._device)
        self._shapes: list[_Specialization] = []
        self._fixed: Fixed | None = None
        self._pool: Any = None
        self._warned: set[str] = set()
        self.replays = 0

    @property
    def graphs(self) -> int:
        return sum(shape.graph is not None for shape in self._shapes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step!r}, graphs={self.graphs}, replays={self.replays})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        signature = tree_map(_signature, given)
        parameters = self._parts.parameters()
        _check_call(parameters)
        with torch.cuda.device(self._device):
            if self._is_followed():
                return self._as_written(given)
            self._compare(parameters)
            shape = self._shape(signature)
            if shape.graph is None and shape.calls < WARM:
                return self._warm(shape, given)
            graph = shape.graph or self._captured(shape, given)
            self.replays += 1
            return graph.replay(given)

    # -- what holds ------------------------------------------------------------------------------------------------------------

    def _is_followed(self) -> bool:
        """Whether somebody looks at what a step does in Python."""
        if any(self._parts.hooks) or has_global_hooks():
            got = "a module has hooks, which a graph would not run, so steps run as they are written"
            self._warn("hooks", got, "remove the hooks; end opfuse.watch before long runs")
            return True
        return bool(listeners() or active_modes() or hooked())

    def _compare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop the graphs if something has changed since they were made."""
        if self._fixed is None or (found := self._parts.fixed(parameters)) == self._fixed:
            return
        names = [name for name, was, now in zip(Fixed._fields, self._fixed, found) if was != now]
        for name in names:
            self._warn(name, f"{_ABOUT[name]}: graphs are dropped", _OFTEN.get(name, _SELDOM))
        self._shapes.clear()
        self._fixed = None

    def _warn(self, what: str, got: str, cure: str) -> None:
        """Once for each kind of cause."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(notice(WHERE, got=got, cure=cure), OpfuseWarning, stacklevel=4)

    # -- the ways of a step ----------------------------------------------------------------------------------------------------

    def _shape(self, signature: Any) -> _Specialization:
        found = next((shape for shape in self._shapes if shape.signature == signature), None)
        if found is None:
            self._shapes.append(found := _Specialization(signature))
        return found

    def _as_written(self, given: tuple[Any, Any]) -> Any:
        """On the stream of the captures, as torch wants warm-up to be."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = tree_map(_detached, self._step(*given[0], **given[1]))
        here.wait_stream(self._stream)
        return result

    def _warm(self, shape: _Specialization, given: tuple[Any, Any]) -> Any:
        """Run a step that makes plans, kernels and states, and look at what its optimizers do."""
        shape.calls += 1
        stepped: list[Optimizer] = []
        before = self._parts.versions_of_settings()
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
        try:
            result = self._as_written(given)
        finally:
            hook.remove()
        for optimizer in stepped:
            _check_optimizer(optimizer, self._parts.optimizers)
        if self._parts.versions_of_settings() != before:
            got = "one that changes settings of its optimizer, as a scheduler does, with values of the CPU"
            cure = "call scheduler.step() behind the graphed step"
            raise UnsupportedError(describe(WHERE, wanted="a step that a graph can repeat", got=got, cure=cure))
        if self._fixed is None:
            self._fixed = self._parts.fixed(self._parts.parameters())  # optimizers make their states in the first step
        return result

    def _captured(self, shape: _Specialization, given: tuple[Any, Any]) -> _CapturedStep:
        parameters = self._parts.parameters()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            shape.graph = _CapturedStep(self._step, given, parameters, self._pool, self._stream)
        except Exception as error:
            for each in parameters:
                each.grad = None  # of a pass that never ran
            _raise(error)
        return shape.graph


class _Parts:
    """The modules and optimizers of a step, and what a graph fixes of them. hooks: dictionaries of all hooks of modules."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.roots, self.optimizers = modules, optimizers
        self._read()

    def _read(self) -> None:
        self._trees = [Tree.of(root) for root in self.roots]
        self.modules = list(dict.fromkeys(module for root in self.roots for module in root.modules()))
        self.hooks = [hooks for module in self.modules for hooks in hooks_of(module)]

    def parameters(self) -> list[torch.Tensor]:
        """Of modules and optimizers, each once."""
        if not all(tree.stands for tree in self._trees):
            self._read()
        own = [p for module in self.modules for p in module._parameters.values() if p is not None]
        others = [p for group in self._groups() for p in group["params"]]
        return [*dict.fromkeys((*own, *others))]

    def fixed(self, parameters: Sequence[torch.Tensor]) -> Fixed:
        """What a graph of this call would fix."""
        buffers = [buffer for module in self.modules for buffer in module._buffers.values()]
        return Fixed(
            parameters=[*map(_fixed, parameters), *map(_fixed, buffers), *(p.requires_grad for p in parameters)],
            modules=[*self.modules, *(m.training for m in self.modules), *(vars(m).get("forward") for m in self.modules)],
            settings=[_fixed(value) for group in self._groups() for name, value in group.items() if name != "params"],
            states=[_fixed(value) for each in self.optimizers for state in each.state.values() for value in state.values()],
            ops=WatchedModule.epoch,
            rules=active_rules().digest,
            torch=(torch.is_grad_enabled(), torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        )

    def versions_of_settings(self) -> list[int]:
        """How often settings were written that are tensors."""
        return [version_of(value) for group in self._groups() for value in group.values() if isinstance(value, torch.Tensor)]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class _Specialization:
    """The step for arguments of one signature. calls: those before the capture."""

    def __init__(self, signature: Any) -> None:
        self.signature, self.calls = signature, 0
        self.graph: _CapturedStep | None = None


class _CapturedStep:
    """A captured step: the memory of its arguments, its results and the gradients that it leaves."""

    def __init__(
        self,
        step: Callable[..., Any],
        given: tuple[Any, Any],
        parameters: Sequence[torch.Tensor],
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        args, kwargs = tree_map(_memory, given)
        self._arguments = _tensors((args, kwargs))
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # a graph that Python found to be garbage in the midst of the capture would invalidate that
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=_BESIDE):
            self._results = tree_map(_detached, step(*args, **kwargs))
        self._trained = [p for p in parameters if p.requires_grad]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def replay(self, given: tuple[Any, Any]) -> Any:
        if self._arguments:
            copy_each(self._arguments, _tensors(given))
        self._graph.replay()
        increment_version(self._trained)  # what autograd and kept casts know of the weights is of the step before
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return tree_map(_memory, self._results)


def _device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """UnsupportedError unless all of ``parameters`` are on one GPU."""
    devices = {str(each.device): each.device for each in parameters}
    found = next(iter(devices.values()), None)
    if len(devices) != 1 or found is None or found.type != "cuda":
        got = " and ".join(devices) or "no parameters"
        cure = (
            "move modules to the GPU first"
            if torch.cuda.is_available()
            else "call the step itself: without a GPU there are no graphs"
        )
        raise UnsupportedError(describe(WHERE, wanted="parameters on one GPU", got=got, cure=cure))
    return found


def _raise(error: Exception) -> NoReturn:
    """UnsupportedError for a step that torch could not capture, with the line of code that it ended at; else the step's error."""
    first = error.__context__ if isinstance(error.__context__, Exception) else error  # torch raises anew where a capture ends
    if not isinstance(first, RuntimeError) or isinstance(first, OpfuseError):
        raise first
    lines = [each for each in extract_tb(first.__traceback__) if not each.filename.startswith(_OURS)]
    at = f" at {lines[-1].filename}:{lines[-1].lineno}, {lines[-1].line}" if lines else ""
    got = f"{str(first).splitlines()[0]}{at}"
    cure = "leave out of the step what waits for the GPU, as loss.item(), and copies from the CPU"
    raise UnsupportedError(describe(WHERE, wanted="a step that a CUDA graph can hold", got=got, cure=cure)) from first


def _check_call(parameters: Sequence[torch.Tensor]) -> None:
    """UnsupportedError in a region of autocast, whose end is outside of the step; PipelineError where gradients are left."""
    if in_region():
        cure = "enter autocast inside of the step"
        raise UnsupportedError(describe(WHERE, wanted="a call outside of autocast", got="an active region", cure=cure))
    left = sum(p.grad is not None for p in parameters)
    if left:
        cure = "call optimizer.zero_grad() at the end of the step, or after an optimizer's step outside of it"
        raise PipelineError(describe(WHERE, wanted="a call without gradients", got=f"{left} that are not None", cure=cure))


def _check_optimizer(optimizer: Optimizer, known: Sequence[Optimizer]) -> None:
    """UnsupportedError if one that steps is not known, or would compute with a number of the CPU, which a graph keeps."""
    name = type(optimizer).__name__
    if not any(optimizer is each for each in known):
        cure = "pass it: graphed_step(step, model, optimizer)"
        raise UnsupportedError(describe(WHERE, wanted="all optimizers of the step", got=f"{name} beside them", cure=cure))
    values = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    values += [value for state in optimizer.state.values() for value in state.values()]
    if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values):
        got = f"{name}, which has a count of steps or a setting there"
        cure = f"{name}(..., capturable=True) if it takes that, with settings on the GPU; else step outside of the graph"
        raise UnsupportedError(describe(WHERE, wanted="no tensor on the CPU", got=got, cure=cure))


def _fixed(value: Any) -> Any:
    """What is compared: of a tensor where it lies, or, if it wraps others, where these lie; all else by value."""
    if type(value) in PLAIN:
        return value.data_ptr()
    if not isinstance(value, torch.Tensor):
        return value
    flatten = getattr(value, "__tensor_flatten__", None)
    return value.data_ptr() if flatten is None else [_fixed(getattr(value, name)) for name in flatten()[0]]


def _signature(argument: Any) -> tuple[Any, ...]:
    """What a graph is made for. UnsupportedError for an argument that it cannot take."""
    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda or argument.requires_grad:
            got = "one that wants a gradient" if argument.is_cuda else f"one on {argument.device.type}"
            cure = "detach it: only parameters get gradients" if argument.is_cuda else "move it to the GPU before the call"
            raise UnsupportedError(describe(WHERE, wanted="tensors on the GPU without gradients", got=got, cure=cure))
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if not isinstance(argument, _PLAIN):
        cure = "pass tensors and plain values, in lists, tuples or dictionaries: dict(batch)"
        raise UnsupportedError(describe(WHERE, wanted="arguments to copy", got=f"a {type(argument).__name__}", cure=cure))
    return type(argument), argument


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(value: Any) -> Any:
    """A copy of a tensor; all else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
