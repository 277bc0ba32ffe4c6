"""``opfuse.graphed_step``: a whole training step, its optimizer included, as one CUDA graph.

A graph repeats what the device did, and none of the Python around it. So what Python would have decided is compared before each
replay (:mod:`opfuse.runtime.graph_inputs`), and a step whose first runs do what a replay could not is refused.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import opfuse
from opfuse.errors import OpfuseError, OpfuseWarning, PipelineError, UnsupportedError, describe, notice
from opfuse.events import listeners
from opfuse.recipes.autocast import in_region
from opfuse.recipes.delayed import DelayedScalingState
from opfuse.runtime.graph_inputs import ABOUT, Fixed, GraphInputs, delayed_states, numbers_drawn, settings_of
from opfuse.runtime.graphs import check_module
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.tensors.optimizers import settle_masters
from opfuse.torch_private.autograd import hooked
from opfuse.torch_private.dispatch import active_modes
from opfuse.torch_private.modules import has_global_hooks
from opfuse.torch_private.operations import copy_each, tree_leaves, tree_map
from opfuse.torch_private.tensors import version_of

WHERE = "opfuse.graphed_step"

WARM = 3
"""Steps of each shape before it is captured: the first makes plans and compiles kernels, the second records the forward pass and
the third the backward pass."""

SHAPES = 64
"""Signatures of arguments that are known at once; of more, the oldest goes with its graph."""

_BESIDE = "thread_local"
"""Other threads may allocate during a capture, as one that pins the memory of a DataLoader's batches does."""

_OURS = tuple(directory for package in (torch, opfuse) for directory in package.__path__)
"""Where code lies that a user did not write."""

_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
"""What an argument or a result may be beside a tensor: a graph is for one value of it."""

_CURES = {
    "settings": "let a setting that changes at each step be a tensor on the GPU, into which schedulers write: "
    "AdamW(..., lr=torch.tensor(1e-3, device='cuda'), capturable=True)",
}
_CURE = "none, if it is to be so: the step is captured again. Else leave it as it was"


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

    Before each replay the call compares what the graph has fixed: :data:`~opfuse.runtime.graph_inputs.ABOUT`. If something has
    changed, graphs are dropped with an OpfuseWarning that says what, and the step is warmed up and captured again. The step runs
    as it is written while somebody listens (:func:`opfuse.explain`, a mode of torch's dispatcher) and, with an OpfuseWarning,
    while modules or parameters have hooks, as under :func:`opfuse.watch`. Other effects of Python code, as ``print``, a counter
    or a tensor that is stored on an object, happen in these calls and in the capture, but not in a replay.

    UnsupportedError for what a graph cannot hold, once and for all calls behind it: code that waits for the device
    (``loss.item()``; the error comes in the fourth call and names the line), random numbers of the host, an optimizer that counts
    or keeps a setting on the CPU, a scheduler inside of the step, writes to arguments, parameters in shards, a machine without a
    GPU. PipelineError for ``parts`` of another kind, and for a call that finds gradients.
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
        self._inputs = GraphInputs(step, modules, optimizers)
        self._device = _device_of(self._inputs.parameters())
        self._stream = torch.cuda.Stream(self._device)
        self._specialized: dict[Any, _Specialization] = {}
        self._fixed: Fixed | None = None
        self._restarts = 0
        self._refusal: Exception | None = None
        self._warned: set[str] = set()
        self._pool: Any = None
        self.replays = 0

    @property
    def graphs(self) -> int:
        return sum(each.graph is not None for each in self._specialized.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step!r}, graphs={self.graphs}, replays={self.replays})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        if self._refusal is not None:
            raise self._refusal
        signature = _signature(given)
        parameters = self._inputs.parameters()
        _check_call(parameters)
        with torch.cuda.device(self._device):
            if self._is_followed(parameters):
                return self._run(given)
            self._compare(parameters)
            found = self._specialization(signature, given)
            if found.graph is None and found.calls < WARM:
                with self._refusing():
                    return self._warm(found, given)
            graph = found.graph or self._captured(found, given, parameters)
            for optimizer in self._inputs.optimizers:
                settle_masters(optimizer)
            self.replays += 1
            return graph.replay(given)

    # -- what holds ------------------------------------------------------------------------------------------------------------

    def _is_followed(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether somebody looks at what a step does in Python."""
        if self._inputs.has_hooks(parameters) or has_global_hooks():
            got = "modules or parameters have hooks, which a graph would not run, so steps run as they are written"
            self._warn("hooks", got, "remove the hooks; end opfuse.watch before long runs")
            return True
        return bool(listeners() or active_modes() or hooked())

    def _compare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin anew if something has changed since the step before; say so if there were graphs, or if it goes on."""
        found = self._inputs.fixed(parameters)
        if self._fixed is None or found == self._fixed:
            self._fixed = found
            return
        self._restarts += 1
        if self.graphs or self._restarts > WARM:
            for name, was, now in zip(Fixed._fields, self._fixed, found):
                if was != now:
                    self._warn(name, f"{ABOUT[name]}: graphs are dropped", _CURES.get(name, _CURE))
        self._drop()
        self._fixed = self._inputs.fixed(parameters)

    def _drop(self) -> None:
        """Forget all graphs. torch wants a new pool where memory of the old one may be alive."""
        self._specialized.clear()
        self._inputs.scaled.clear()
        self._pool = None

    def _warn(self, what: str, got: str, cure: str) -> None:
        """Once for each kind of cause, until a step is captured again."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(notice(WHERE, got=got, cure=cure), OpfuseWarning, stacklevel=4)

    def _specialization(self, signature: Any, given: Any) -> _Specialization:
        found = self._specialized.get(signature)
        if found is None:
            _check_dense(_tensors(given))
            self._specialized[signature] = found = _Specialization()
        if len(self._specialized) > SHAPES:
            oldest = next(iter(self._specialized))
            if self._specialized.pop(oldest).graph is None:
                got = f"more than {SHAPES} shapes or values of arguments, most of which never came {WARM + 1} times"
                self._warn("arguments", got, "pad batches to few lengths; pass numbers that change as tensors on the GPU")
        return found

    # -- the ways of a step ----------------------------------------------------------------------------------------------------

    def _run(self, given: tuple[Any, Any]) -> Any:
        """As written. What the step itself writes around it is no change, since a replay writes nothing there."""
        before = None if self._fixed is None else self._fixed.values == self._inputs.values()
        result = self._as_written(given)
        if before and self._fixed is not None:
            self._fixed = self._fixed._replace(values=self._inputs.values())
        return result

    def _as_written(self, given: tuple[Any, Any]) -> Any:
        """On the stream of the captures, as torch wants warm-up to be."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                return tree_map(_copied, self._step(*given[0], **given[1]))
        finally:
            here.wait_stream(self._stream)

    def _warm(self, found: _Specialization, given: tuple[Any, Any]) -> Any:
        """Run a step that makes plans, kernels and states, and look at what a graph could not repeat."""
        stepped: list[Optimizer] = []
        arguments = _tensors(given)
        before = self._inputs.versions_of_settings(), [*map(version_of, arguments)]
        drawn = numbers_drawn()
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
        try:
            result = self._run(given)
        finally:
            hook.remove()
        for optimizer in stepped:
            _check_optimizer(optimizer, self._inputs.optimizers)
        after = self._inputs.versions_of_settings(), [*map(version_of, arguments)]
        wanted = "a step that a graph can repeat"
        if before[0] != after[0]:
            got, cure = "one that writes settings of its optimizer, as a scheduler does", "call scheduler.step() behind the step"
            raise UnsupportedError(describe(WHERE, wanted=wanted, got=got, cure=cure))
        if before[1] != after[1]:
            got, cure = "one that writes into an argument, which a graph copies", "return the value, or keep it in a buffer"
            raise UnsupportedError(describe(WHERE, wanted=wanted, got=got, cure=cure))
        if found.calls and numbers_drawn() != drawn:  # compilers draw in the first
            got, cure = "one that draws random numbers on the CPU", "draw them on the GPU, or before the call, as arguments"
            raise UnsupportedError(describe(WHERE, wanted=wanted, got=got, cure=cure))
        _check_results(result, self._device)
        found.calls += 1
        if found.calls == 1 and not self.graphs:
            self._fixed = self._inputs.fixed(self._inputs.parameters())  # first steps make states, and modules what they keep
        return result

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What the block refuses is refused at each later call."""
        try:
            yield
        except UnsupportedError as error:
            self._refusal = error
            raise

    def _captured(self, found: _Specialization, given: tuple[Any, Any], parameters: Sequence[torch.Tensor]) -> _CapturedStep:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        versions = self._inputs.versions(parameters)
        generations = {state: state.generation for state in delayed_states()}
        here, generator = torch.cuda.current_stream(), torch.cuda.default_generators[self._device.index]
        drawn = generator.clone_state()  # that of a capture that fails goes on to be captured
        failed: list[Exception] = []
        try:
            with _noted(failed):
                graph = _CapturedStep(self._step, given, parameters, pool=self._pool, stream=self._stream, failed=failed)
        except Exception:
            torch.cuda.set_stream(here)
            generator.graphsafe_set_state(drawn)
            for each in parameters:
                each.grad = None  # of a pass that never ran
            self._drop()
            reason = _reason(failed[0])
            self._refusal = reason if isinstance(reason, UnsupportedError) else None
            raise reason from (None if reason is failed[0] else failed[0])
        graph.written = [tensor for tensor, version in versions.items() if version_of(tensor) != version]
        graph.written += [p for optimizer in graph.stepped for group in optimizer.param_groups for p in group["params"]]
        graph.advanced = [state for state, generation in generations.items() if state.generation != generation]
        self._inputs.scaled.update(dict.fromkeys(graph.advanced))
        self._fixed = self._inputs.fixed(parameters)
        self._restarts = 0
        self._warned.clear()
        found.graph = graph
        return graph


class _Specialization:
    """The step for arguments of one signature. calls: those before the capture."""

    calls = 0
    graph: _CapturedStep | None = None


class _CapturedStep:
    """A captured step: the memory of its arguments, its results and the gradients that it leaves.

    stepped: the optimizers in it. written: tensors that it writes and of which others may know a version. advanced: states of
    delayed scaling that it updates. flags: parameters whose gradient it adds to ``main_grad``.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        given: tuple[Any, Any],
        parameters: Sequence[torch.Tensor],
        *,
        pool: Any,
        stream: torch.cuda.Stream,
        failed: list[Exception],
    ) -> None:
        args, kwargs = tree_map(_copied, given)
        self._arguments = _tensors((args, kwargs))
        self.stepped: list[Optimizer] = []
        self.written: list[torch.Tensor] = []
        self.advanced: list[DelayedScalingState] = []
        self._graph = torch.cuda.CUDAGraph()
        flags = [p for p in parameters if getattr(p, "grad_added_to_main_grad", None) is False]
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self.stepped.append(optimizer))
        gc.collect()  # a graph that Python found to be garbage in the midst of the capture would invalidate that
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=_BESIDE), _noted(failed):
                self._results = tree_map(_detached, step(*args, **kwargs))
        finally:
            hook.remove()
            if collects:
                gc.enable()
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        self._flags: list[Any] = [p for p in flags if p.grad_added_to_main_grad]  # type: ignore[attr-defined]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def replay(self, given: tuple[Any, Any]) -> Any:
        if self._arguments:
            copy_each(self._arguments, _tensors(given))
        self._graph.replay()
        if self.written:
            increment_version(self.written)
        for state in self.advanced:
            state.generation += 1
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter in self._flags:
            parameter.grad_added_to_main_grad = True
        return tree_map(_copied, self._results)


@contextmanager
def _noted(failed: list[Exception]) -> Iterator[None]:
    """Keep the first error: torch raises others where it ends a capture that has failed."""
    try:
        yield
    except Exception as error:
        failed.append(error)
        raise


def _reason(first: Exception) -> Exception:
    """UnsupportedError for a step that torch could not capture, with the line of code that it ended at; else the step's error."""
    if not isinstance(first, RuntimeError) or isinstance(first, (OpfuseError, torch.OutOfMemoryError)):
        return first
    lines = [each for each in extract_tb(first.__traceback__) if not each.filename.startswith(_OURS)]
    at = f" at {lines[-1].filename}:{lines[-1].lineno}, {lines[-1].line}" if lines else ""
    got = f"{(str(first) or type(first).__name__).splitlines()[0]}{at}"
    cure = (
        "leave out of the step what waits for the GPU, as loss.item(), and copies from the CPU; make optimizers capturable=True; "
        "let go of losses of steps that ran outside"
    )
    return UnsupportedError(describe(WHERE, wanted="a step that a CUDA graph can hold", got=got, cure=cure))


# -- checks ----------------------------------------------------------------------------------------------------------------------


def _check_call(parameters: Sequence[torch.Tensor]) -> None:
    """UnsupportedError in a region whose end is outside of the step; PipelineError where gradients are left."""
    if in_region():
        cure = "enter autocast inside of the step"
        raise UnsupportedError(describe(WHERE, wanted="a call outside of autocast", got="an active region", cure=cure))
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        cure = "enter torch.autocast inside of the step, or with cache_enabled=False"
        got = "an active region, which keeps casts of weights to its end"
        raise UnsupportedError(describe(WHERE, wanted="a call outside of torch.autocast", got=got, cure=cure))
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
    values = tree_leaves((settings_of(optimizer), [*optimizer.state.values()]))
    if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values):
        got = f"{name}, which has a count of steps or a setting there"
        cure = f"{name}(..., capturable=True) if it takes that, with settings on the GPU; "
        cure += "of torchao, make it and step `with torch.device('cuda')`; else step outside of the graph"
        raise UnsupportedError(describe(WHERE, wanted="no tensor on the CPU", got=got, cure=cure))


def _check_results(result: Any, device: torch.device) -> None:
    """UnsupportedError for what cannot be copied, or is read before the device has written it."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.device == device:
            continue
        if not isinstance(leaf, _VALUES):
            got = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            cure = "return tensors of the GPU and plain values, in lists, tuples or dictionaries"
            raise UnsupportedError(describe(WHERE, wanted="results to copy", got=got, cure=cure))


def _check_dense(arguments: Sequence[torch.Tensor]) -> None:
    """UnsupportedError for a tensor with gaps, whose copy would lie otherwise."""
    for each in arguments:
        if torch.empty_like(each, device="meta").stride() != each.stride():
            got = f"strides {each.stride()} of shape {tuple(each.shape)}"
            raise UnsupportedError(describe(WHERE, wanted="tensors without gaps", got=got, cure="pass x.contiguous()"))


def _device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """UnsupportedError unless all of ``parameters`` are on one GPU."""
    devices = {str(each.device): each.device for each in parameters}
    found = next(iter(devices.values()), None)
    if len(devices) != 1 or found is None or found.type != "cuda":
        got = " and ".join(devices) or "no parameters"
        here = torch.cuda.is_available()
        cure = "move modules to the GPU first" if here else "call the step itself: this machine has no GPU, so no CUDA graphs"
        raise UnsupportedError(describe(WHERE, wanted="parameters on one GPU", got=got, cure=cure))
    return found


# -- arguments and results -------------------------------------------------------------------------------------------------------


def _signature(given: Any) -> tuple[Any, ...]:
    """What a graph is made for: the structure of arguments, in order, and what each of them is."""
    return repr(tree_map(lambda _: None, given)), *map(_described, tree_leaves(given))


def _described(argument: Any) -> tuple[Any, ...]:
    """UnsupportedError for an argument that a graph cannot take."""
    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda or argument.requires_grad or type(argument) not in PLAIN:
            got, cure = f"one on {argument.device.type}", "move it to the GPU before the call"
            if argument.is_cuda:
                got, cure = "one that wants a gradient", "detach it: only parameters get gradients"
            if type(argument) not in PLAIN:
                got, cure = f"a {type(argument).__name__}", "keep it in a module or in a closure: a graph copies plain tensors"
            raise UnsupportedError(describe(WHERE, wanted="plain tensors on the GPU without gradients", got=got, cure=cure))
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if not isinstance(argument, _VALUES):
        cure = "pass tensors and plain values, in lists, tuples or dictionaries: dict(batch)"
        raise UnsupportedError(describe(WHERE, wanted="arguments to copy", got=f"a {type(argument).__name__}", cure=cure))
    return type(argument), repr(argument)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    """A copy of a tensor, detached; all else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
