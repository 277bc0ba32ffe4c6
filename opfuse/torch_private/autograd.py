"""autograd: the backward pass that runs, its nodes, and the hooks of what is saved for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from opfuse.torch_private.dispatch import in_transform
from opfuse.torch_private.names import convention, private


def _in_backward(read: Callable[[], Any], **options: Any) -> list[Any]:
    """What ``read`` returns in two nodes of a backward pass."""
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    for each in (y, x):
        each.register_hook(lambda grad: seen.append(read()))
    y.backward(**options)
    return seen


def _numbers_passes(number: Callable[[], int]) -> bool:
    (one, same), (other, _) = _in_backward(number), _in_backward(number)
    return number() == -1 and one == same >= 0 and other != one


backward_pass: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    _numbers_passes,
    use="telling one backward pass from another, and from none",
    breaks="delayed scales of gradients would be updated twice or never, and recomputations taken for first runs",
)
"""The number of the running backward pass; negative outside of one."""


def _is_kept(keeps: Callable[[], bool]) -> bool:
    return _in_backward(keeps) == [False] * 2 and _in_backward(keeps, retain_graph=True) == [True] * 2


keeps_graph: Callable[[], bool] = private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    _is_kept,
    use="freeing what a compiled call has saved after its only backward pass",
    breaks="a second backward pass would find nothing, or memory would never be freed",
)
"""Whether the running backward pass has ``retain_graph=True``."""


def _sees_profiles(on: Callable[[], bool]) -> bool:
    with torch.autograd.profiler.profile():
        inside = on()
    return inside is True and on() is False


is_profiling: Callable[[], bool] = private(
    "torch.autograd._profiler_enabled",
    _sees_profiles,
    use="naming pipelines in a profile, and nowhere else, since a name takes time",
    breaks="a profile would not say whose kernels it has",
)
"""Whether torch.profiler looks at this thread."""


def _sees_hooks(top: Callable[[bool], Any]) -> bool:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        inside = top(False)
    return inside == (pack, pack) and top(False) is None is top(True)


saving_hooks: Callable[[bool], Any] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    _sees_hooks,
    use="searching for a checkpoint only where there may be one",
    breaks="checkpoints would be missed, or each call would search the whole stack",
)
"""The innermost hooks of ``torch.autograd.graph.saved_tensors_hooks``, or None. The argument: also while torch traces."""


_VIEWS = frozenset(
    (
        *("ViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "TBackward0", "PermuteBackward0"),
        *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    )
)
"""Nodes of views of all elements."""

_SAVES_RESULT = frozenset(
    (
        *("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"),
        *("ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductCudnnAttentionBackward0"),
        *("SoftmaxBackward0", "SigmoidBackward0", "TanhBackward0", "ReluBackward0", "ExpBackward0"),
    )
)
"""Nodes that save their result whatever gradients are wanted; others, as that of a power, may do without it."""


def _names_saved_results() -> bool:
    x = torch.ones(2, 2, 2, 2, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    nodes = [getattr(each.grad_fn, name, None) for each, name in ((x.sigmoid(), "_saved_result"), (attended, "_saved_output"))]
    views = x.sigmoid().view(-1).transpose(0, 0), x.sigmoid().squeeze(), attended
    return None not in nodes and all(map(is_saved_by_its_node, views)) and not any(map(is_saved_by_its_node, (x + x, x.sin(), x)))


convention(
    "torch.autograd.graph.Node.name",
    _names_saved_results,
    use="seeing that an input is kept by the op that made it, so that its cast need not be",
    breaks="the casts of attention's results would be saved beside these results",
)


def _keep_tensors(hooks: Any) -> bool:
    """Whether what is saved twice takes no more memory: there are no hooks, or they say that they keep the tensors themselves."""
    return hooks is None or getattr(getattr(hooks[0], "__self__", None), "keeps_tensors", False)


def is_saved_by_its_node(x: torch.Tensor) -> bool:
    """Whether the op that made a tensor, or what it is a view of, saves it for its own backward pass, as attention does.

    False under hooks of saved tensors that may store a tensor anew for each op that saves it.
    """
    node = x.grad_fn
    while node is not None and (name := type(node).__name__) not in _SAVES_RESULT:
        node = node.next_functions[0][0] if name in _VIEWS else None
    return node is not None and _keep_tensors(saving_hooks(True))


def are_of_checkpoint(hooks: Any) -> bool:
    """Whether hooks of saved tensors are those of a non-reentrant checkpoint, in its first run or when it recomputes."""
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


HOOKED, COMPARED = "hooked", "compared"


def hooked() -> str:
    """HOOKED where hooks of saved tensors are set, which may count them; COMPARED if they are those of a checkpoint, which
    compares what its two runs save; empty where none are set. Hooks of a call in a compiled graph are none of these, and take
    blocks: of 128 experts it saves 500 tensors otherwise, which takes the host 10 ms a layer.
    """
    hooks = saving_hooks(True)
    if hooks is None or getattr(getattr(hooks[0], "__self__", None), "takes_blocks", False):
        return ""
    return COMPARED if are_of_checkpoint(hooks) else HOOKED


class _SampleFunction(torch.autograd.Function):
    """Calls a function in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], read: Callable[[], Any]) -> torch.Tensor:
        seen.append(read())
        return x.clone()


def _is_off_in_functions(enabled: Callable[[], bool]) -> bool:
    seen: list[bool] = []
    _SampleFunction.apply(torch.ones(1, requires_grad=True), seen, enabled)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        seen.append(enabled())
    return seen == [False, True] and enabled()


outside_function: Callable[[], bool] = private(
    "torch._C._is_fwd_grad_enabled",
    _is_off_in_functions,
    use="noticing a reentrant checkpoint, whose forward is that of an autograd.Function",
    breaks="reentrant checkpoints would recompute under another recipe",
)
"""Off in the forward of an ``autograd.Function``, but not under ``torch.no_grad()``; off also in inference mode."""


def _is_node(current: Callable[[], Any]) -> bool:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    y = x.exp()
    y.grad_fn.register_prehook(lambda grads: seen.append(current()))  # type: ignore[union-attr]
    y.backward()
    return current() is None and seen == [y.grad_fn]


current_node: Callable[[], Any] = private(
    "torch._C._current_autograd_node",
    _is_node,
    use="finding the parameters whose gradients a node computes",
    breaks="gradients would go to main_grad although nobody asked for them, or not at all",
)
"""The node of autograd's graph that runs now; None outside of a backward pass."""


def _knows_what_runs(will_run: Callable[[Any], bool]) -> bool:
    x, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    y = x * other
    leaves = [leaf for leaf, _ in y.grad_fn.next_functions]  # type: ignore[union-attr]
    seen: list[bool] = []
    y.register_hook(lambda grad: seen.extend([will_run(leaf) for leaf in leaves]))
    y.backward(inputs=[x])
    return seen == [True, False]


will_run: Callable[[Any], bool] = private(
    "torch._C._will_engine_execute_node",
    _knows_what_runs,
    use="adding to main_grad only in passes that ask for the weight's gradient",
    breaks="backward(inputs=[x]) would change the gradients of weights",
)
"""Whether the running backward pass runs a node; RuntimeError if it only captures the node's gradient."""


def _runs_after(queue: Callable[[Callable[[], Any]], Any]) -> bool:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: queue(lambda: order.append("after")))
    x.register_hook(lambda grad: order.append("last node"))
    y.backward()
    return order == ["last node", "after"]


after_backward: Callable[[Callable[[], Any]], Any] = private(
    "torch.autograd.variable.Variable._execution_engine.queue_callback",
    _runs_after,
    use="updating delayed scales of gradients after a backward pass",
    breaks="they would never be updated",
)
"""Have a function called once the running backward pass is over."""


def _has_level(_: Any) -> bool:
    before = forward_ad._current_level
    with forward_ad.dual_level():
        inside = forward_ad._current_level
    return before == forward_ad._current_level == -1 and inside == 0


private(
    "torch.autograd.forward_ad._current_level",
    _has_level,
    use="refusing forward-mode AD in words",
    breaks="tangents would be dropped silently",
)


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on: a level of dual tensors is open."""
    return forward_ad._current_level >= 0


def is_followed() -> bool:
    """Whether a transform of torch.func, forward-mode AD or torch.jit.trace follows what runs. Asked at every call, so in one."""
    return in_transform() or forward_ad._current_level >= 0 or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
