"""What follows a call instead of running it is refused by one type of error; torch.compile gets a graph break that says why.

Where a call can be an op of its graph, ``tests/runtime/test_compiled.py`` has it.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from opfuse import ops
from opfuse.core.watched import all_enrolled, enrolled
from opfuse.errors import PipelineError, UnsupportedError
from tests.ops.test_op_errors import raised

X = torch.randn(4, 8)


def model() -> ops.Sequential:
    return ops.Sequential(ops.Linear(8, 8), ops.GELU())


def dual(made, *, frozen: bool):
    with forward_ad.dual_level():
        return made.requires_grad_(not frozen)(forward_ad.make_dual(X, torch.ones_like(X)))


FOLLOWERS = {
    "torch.jit.trace": (lambda made: torch.jit.trace(made, X), r"torch\.jit\.trace"),
    "torch.fx": (torch.fx.symbolic_trace, r"torch\.fx\.Proxy"),
    "torch.export": (lambda made: torch.export.export(made, (X,), strict=False), r"torch\.export"),
    "dual": (lambda made: dual(made, frozen=False), "dual tensor"),
    "dual, frozen": (lambda made: dual(made, frozen=True), "dual tensor"),
    "torch.func.jvp": (lambda made: torch.func.jvp(made, (X,), (X,)), r"torch\.func"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("make_model", [model, ops.GELU], ids=["sequential", "op"])
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_what_does_not_run_a_call_is_refused(follower, make_model):
    follow, got = FOLLOWERS[follower]
    made = make_model()
    made(X)
    with raised(UnsupportedError, RuntimeError, "wants", f"got .*{got}"):
        follow(made)
    assert made(X).shape == X.shape


def test_a_refused_export_leaves_a_pipeline_as_it_was():
    """torch.export puts copies in the place of what attributes of a module hold."""
    made = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8))
    made(X)
    with pytest.raises(UnsupportedError, match=r"torch\.export"):
        torch.export.export(made, (X,), strict=False)
    assert made(X[:1]).shape == X[:1].shape  # of another number of rows, for which it is planned anew
    with torch.no_grad():
        made(X)


@pytest.mark.cpu
@pytest.mark.parametrize("called_before", [False, True])
def test_a_graph_break_says_whose_it_is(called_before):
    """Where an op writes into a tensor of the caller; other pipelines are ops of the graph."""
    torch._dynamo.reset()
    made = ops.Sequential(ops.Linear(16, 16), ops.AddExtraInput(in_place=True))
    x = torch.randn(16, 16)
    wanted = made(x, torch.zeros(16, 16)) if called_before else None
    with pytest.raises(Exception, match="opfuse runs its own plans") as caught:
        torch.compile(made, backend="eager", fullgraph=True)(x, torch.zeros(16, 16))
    assert type(caught.value).__module__.startswith("torch._dynamo")
    found = torch.compile(made, backend="eager")(x, torch.zeros(16, 16))
    assert wanted is None or torch.equal(found, wanted)
    with pytest.raises(Exception, match=r"opfuse runs its own plans|fullgraph=True"):  # which torch alone would let pass
        torch.compile(made, backend="eager", fullgraph=True)(x, torch.zeros(16, 16))
    torch._dynamo.reset()


@pytest.mark.parametrize("registered", [False, True], ids=["", "use_orig_params"])
def test_parameters_that_are_views_into_a_flat_one(registered):
    """As FullyShardedDataParallel leaves them where a module runs."""
    made = ops.Linear(8, 8)
    made(X)
    flat = nn.Parameter(torch.randn(72))
    flat._is_flat_param = True
    view = flat[:64].view(8, 8)
    if registered:
        made._parameters["weight"] = view
        made = ops.Sequential(made)
    else:
        del made.weight
        made.weight = view
    with raised(UnsupportedError, RuntimeError, "weight as a plain tensor", "FullyShardedDataParallel"):
        made(X)


def test_nested_tensors():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    for op, args in ((ops.Linear(8, 8), (nested,)), (ops.AddExtraInput(), (X, nested))):
        with raised(UnsupportedError, RuntimeError, "strided tensors", "a nested tensor"):
            op(*args)


def test_an_extra_input_that_is_expanded_is_not_overwritten():
    extra = torch.zeros(1, 8).expand(4, 8)
    with raised(PipelineError, ValueError, "extra input", "memory for each element", r"expanded to \(4, 8\)"):
        ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True))(X, extra)
    assert not extra.any()


def test_an_inference_tensor_that_would_be_saved():
    made = model()
    with torch.inference_mode():
        x = X.clone()
        assert made(x).shape == x.shape
    with raised(UnsupportedError, RuntimeError, "autograd can save", r"\(4, 8\) made in torch\.inference_mode"):
        made(x)
    with torch.no_grad():
        made(x)
    made(x.clone()).sum().backward()


@pytest.mark.cpu
def test_gradients_that_are_many_in_one_are_refused():
    made = model()
    for _ in range(4):
        x = X.clone().requires_grad_()
        y = made(x)
        with raised(UnsupportedError, RuntimeError, "wants plain gradients", "vmap"):
            torch.autograd.grad(y, x, torch.stack([y.detach(), 2 * y.detach()]), is_grads_batched=True)
        with raised(UnsupportedError, RuntimeError, "wants plain gradients", "vmap"):
            torch.autograd.functional.jacobian(made, X, vectorize=True)
        assert torch.autograd.functional.jacobian(made, X).shape == (4, 8, 4, 8)


def test_pipelines_are_listed_while_another_thread_makes_and_drops_some():
    """A write to a class of ops lists them, and so does a compiler that traces one."""
    kept, stop = [ops.GELU() for _ in range(300)], threading.Event()

    def work():
        while not stop.is_set():
            for op in [ops.ReLU() for _ in range(20)]:
                enrolled(int(op.ticket))

    other, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other.start()
        for _ in range(300):
            assert {*map(id, kept)} <= {*map(id, all_enrolled())}
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
