"""torch.compile and torch.export, which are never imported here: that takes a second, and training without them needs no part."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.torch_private.names import convention, deferred, private
from opfuse.torch_private.stack import frames

_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a function under torch.compile."""
    return torch.compile(function, backend="eager", **options)(*args)


# -- what traces -----------------------------------------------------------------------------------------------------------------


def _is_exported() -> bool:
    class ExportedSample(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + int(in_export())

    exported = torch.export.export(ExportedSample(), (torch.zeros(1),)).module()(torch.zeros(1))
    compiled = _compiled(lambda x: x + int(in_export()), torch.zeros(1))
    return bool(exported == 1) and bool(compiled == 0) and not in_export()


convention(
    "torch.compiler._is_exporting_flag",
    _is_exported,
    use="refusing torch.export in words",
    breaks="an exported program would hold a call that nothing but this process can run",
    slow=True,
)


def in_export() -> bool:
    """Whether torch.export traces. ``torch.compiler.is_exporting()`` says yes to every trace of torch 2.11."""
    return torch.compiler._is_exporting_flag


def _is_called_back(callback: Callable[[], Any]) -> bool:
    seen: list[bool] = []

    class MadeInside:
        def __init__(self) -> None:
            if torch.compiler.is_compiling():
                break_graph("an object is made")
            seen.append(callable(callback()))

    def make(x: torch.Tensor) -> torch.Tensor:
        MadeInside()
        return x + 1

    with warnings.catch_warnings():  # of a function that dynamo does not follow
        warnings.simplefilter("ignore")
        _compiled(make, torch.zeros(1))
        _compiled(not_traced(make), torch.zeros(1))
    return seen == [True, False] and not callable(callback())


frame_callback: Callable[[], Any] = private(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    _is_called_back,
    use="refusing ops that are made in code under torch.compile",
    breaks="dynamo would follow the constructor of an op and fail inside",
    slow=True,
)
"""What torch.compile has Python call for each frame; callable while compiled code may be traced."""


def _breaks() -> bool:
    from torch._dynamo.exc import Unsupported

    def broken(x: torch.Tensor) -> torch.Tensor:
        break_graph("because of opfuse")
        return x + 1

    try:
        _compiled(broken, torch.zeros(1), fullgraph=True)
    except Unsupported as error:
        return "because of opfuse" in str(error) and bool(_compiled(broken, torch.zeros(1)) == 1)
    return False


convention(
    "torch._dynamo.graph_break",
    _breaks,
    use="saying why a call is no part of a graph",
    breaks="the call would fail under torch.compile",
    slow=True,
)


def break_graph(why: str) -> None:
    """Under torch.compile, a graph break that says why."""
    torch._dynamo.graph_break(msg=why)


def _is_constant() -> bool:
    seen: list[int] = []

    @constant_when_traced
    def number() -> int:
        seen.append(1)
        return len(seen)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + number()

    run = torch.compile(twice, backend="eager", fullgraph=True)
    return bool(run(torch.zeros(1)) == run(torch.zeros(1)))


convention(
    "torch._dynamo_marked_constant",
    _is_constant,
    use="tickets of pipelines in graphs, without the import that torch.compiler.assume_constant_result takes",
    breaks="compiled calls would break their graph",
    slow=True,
)


def constant_when_traced(function: _F) -> _F:
    """As ``torch.compiler.assume_constant_result``: dynamo runs the function while it traces."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _is_not_traced(hide: Callable[[Any], Any]) -> bool:
    seen: list[bool] = []

    @hide
    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x

    _compiled(lambda x: inside(x) + 1, torch.zeros(1))
    return seen == [False]


not_traced: Callable[[_F], _F] = private(
    "torch._disable_dynamo",
    _is_not_traced,
    use="operations that dynamo does not look into, without the import that torch.compiler.disable takes",
    breaks="import opfuse would take a second longer, or dynamo would trace how a call runs",
    slow=True,
)
"""As ``torch.compiler.disable``."""


def _knows_fullgraph() -> bool:
    seen: list[bool] = []

    @not_traced
    def note() -> None:
        seen.append(in_fullgraph())

    def broken(x: torch.Tensor) -> torch.Tensor:
        note()
        return x + 1

    _compiled(broken, torch.zeros(1))
    _compiled(broken, torch.zeros(1), fullgraph=True)
    return seen == [False, True]


convention(
    "torch._dynamo.eval_frame.compile_wrapper",
    _knows_fullgraph,
    use="refusing a graph break under fullgraph=True that an earlier compilation has met",
    breaks="such a call would run outside of the graph without a word",
    slow=True,
)


def in_fullgraph() -> bool:
    """Whether the caller was compiled with ``fullgraph=True``: read off Python's stack, since torch does not say so."""
    return any(
        frame.f_code.co_name == "compile_wrapper" and getattr(frame.f_locals.get("self"), "fullgraph", False)
        for frame in frames()
    )


# -- graphs ----------------------------------------------------------------------------------------------------------------------


def _finds_graph(_: Any) -> bool:
    seen: list[Any] = []

    @constant_when_traced
    def note() -> int:
        seen.append(traced_graph())
        return 1

    _compiled(lambda x: x + note(), torch.zeros(1), fullgraph=True)
    return isinstance(seen[0], torch.fx.Graph) and traced_graph() is None


_translator = deferred(
    "torch._dynamo.symbolic_convert.InstructionTranslator",
    _finds_graph,
    use="noticing writes in a graph that tensors do not count",
    breaks="modules that share a product might read an input before it is written",
)


def traced_graph() -> torch.fx.Graph | None:
    """The graph that dynamo makes now; None if it makes none."""
    try:
        graph: torch.fx.Graph = _translator().current_tx().output.graph
    except AttributeError:
        return None
    return graph


def _is_in_body() -> bool:
    seen: list[bool] = []

    @constant_when_traced
    def note() -> int:
        seen.append(in_body())
        return 1

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + note()

    def around(x: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
        return inside + note()

    _compiled(around, torch.zeros(1, requires_grad=True), fullgraph=True)
    return seen == [True, False] and not in_body()


convention(
    "torch._dynamo.output_graph.SubgraphTracer.parent",
    _is_in_body,
    use="calls in a checkpoint inside of compiled code, which the compiler runs again in the backward pass",
    breaks="such calls would be refused in the backward pass",
    slow=True,
)


def in_body() -> bool:
    """Whether dynamo follows the body of a higher-order op, as the function of a checkpoint inside of compiled code."""
    try:
        return _translator().current_tx().output.current_tracer.parent is not None
    except AttributeError:
        return False


def _changes_outside() -> bool:
    seen: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        changing_outside(seen.append, 1)
        return x + len(seen)

    def around(x: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
        return inside

    made = _compiled(around, torch.zeros(1, requires_grad=True), fullgraph=True)
    return bool(made == 1) and seen == [1]


convention(
    "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
    _changes_outside,
    use="modules that share a product in a checkpoint inside of compiled code",
    breaks="the graph would break at each of them",
    slow=True,
)


def changing_outside(function: Callable[..., None], *args: Any) -> None:
    """In code that dynamo follows, call a function that changes an object outside of the checkpoint that the code may be in."""
    torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def _detects(detect: Callable[..., Any]) -> bool:
    with fake_tensor_mode()() as mode:
        x = torch.zeros(1)
    return detect() is None and detect([x]) is mode


detect_fake_mode: Callable[..., Any] = private(
    "torch._guards.detect_fake_mode",
    _detects,
    use="telling one graph from another",
    breaks="modules that share a product might do so over two graphs",
    slow=True,
)
"""The mode of the tensors without memory that is active; None if none is."""


def _makes_shapes(kind: Any) -> bool:
    with kind(allow_non_fake_inputs=True):
        return tuple((torch.zeros(2, 3) @ torch.zeros(3, 4)).shape) == (2, 4)


fake_tensor_mode = deferred(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    _makes_shapes,
    use="computing shapes of results without values",
    breaks="calls could not be compiled",
)
"""Returns the class of modes under which tensors have no memory."""

dynamic_shape_error = deferred(
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    lambda error: issubclass(error, RuntimeError) and error(torch.ops.aten.add.Tensor) is not None,
    use="having dynamo run outside of its graphs a call that will raise an error",
    breaks="an error of a call would be hidden behind one of torch.compile",
)
"""Returns the class of errors that say that shapes depend on values."""


# -- what runs a compiled graph --------------------------------------------------------------------------------------------------


def _has_flag() -> bool:
    from torch._dynamo import compiled_autograd as module

    return module.in_compiled_autograd_region is False and compiled_autograd() is module


convention(
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
    _has_flag,
    use="refusing compiled autograd where delayed scaling needs the end of a backward pass",
    breaks="delayed scales of gradients would not be updated under it",
    slow=True,
)


def compiled_autograd() -> ModuleType | None:
    """torch's module that compiles backward passes, if anybody has imported it."""
    return sys.modules.get("torch._dynamo.compiled_autograd")


def is_compiler_loaded() -> bool:
    """Whether anybody has imported torch.compile."""
    return "torch._dynamo" in sys.modules


def _follows_mode() -> bool:
    from torch._inductor import config, list_mode_options

    with config.patch(list_mode_options("reduce-overhead")):
        return makes_cuda_graphs()


convention(
    "torch._inductor.config.triton.cudagraphs",
    _follows_mode,
    use="telling users of mode='reduce-overhead' that its CUDA graphs end in front of pipelines",
    breaks="compiled pipelines would run as slowly as without the mode, and nobody would say why",
    slow=True,
)


def makes_cuda_graphs() -> bool:
    """Whether torch.compile, which compiles now, was asked for CUDA graphs."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


COMPILED_MODULES = ("torch._functorch.", "torch._library.")
"""Modules whose functions run what torch.compile has made."""


def runs_compiled_backward(frame: FrameType) -> bool:
    """Whether the function of a frame runs the backward pass of compiled code."""
    return frame.f_code.co_name == "backward" and str(frame.f_globals.get("__name__", "")).startswith(COMPILED_MODULES)


def _runs_backward() -> bool:
    seen: list[bool] = []

    class StackOfOperations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(any(map(runs_compiled_backward, frames())))
            return func(*args, **(kwargs or {}))

    y = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(torch.ones(2, requires_grad=True))
    with StackOfOperations():  # type: ignore[no-untyped-call]
        torch.ones(1)
        y.backward()
    return any(seen) and not seen[0]


convention(
    "torch._functorch._aot_autograd.runtime_wrappers",
    _runs_backward,
    use="telling functions that run a compiled graph from checkpoints",
    breaks="a compiled call inside of a checkpoint would be refused or recomputed under another recipe",
    slow=True,
)
