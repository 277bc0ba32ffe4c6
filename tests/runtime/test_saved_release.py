"""What an op saved goes when its backward is over, not when that of its whole autograd node is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.core.context import Context


@pytest.mark.parametrize("kept", [False, True], ids=["once", "graph kept"])
def test_saved_tensors_go_with_the_op_that_read_them(kept, monkeypatch):
    """Two linear layers in one node: when the first one's gradients are computed, what the second one saved is gone."""
    model = ops.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 64)).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    held: list[weakref.ref] = []
    alive: list[int] = []
    restored, forget = Context.restored, Context.forget

    def watched(self, tensors):
        context = restored(self, tensors)
        values = (value for value in context.saved_state().values() if value is not None)
        tensors = [t for value in values for t in (value.tensors() if hasattr(value, "tensors") else (value,))]
        held.extend(weakref.ref(t) for t in tensors if not isinstance(t, torch.nn.Parameter))
        return context

    def counted(self):
        forget(self)
        gc.collect()
        alive.append(sum(ref() is not None for ref in held))

    monkeypatch.setattr(Context, "restored", watched)
    monkeypatch.setattr(Context, "forget", counted)
    with opfuse.autocast(recipe=recipes.Float8BlockScaling()):
        y = model(x)
    y.sum().backward(retain_graph=kept)
    if kept:
        assert set(alive) == {len(held)}
    else:
        assert alive[0] > alive[len(alive) // 2]
        assert alive == sorted(alive, reverse=True)
        assert alive[-1] == 0


def test_a_kept_graph_gives_the_same_gradients_again():
    model = ops.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 64)).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = model(x)
    first = torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), [x])


def test_a_written_tensor_goes_with_its_graph():
    """No node holds what it returns: interpreted, recorded, where that is refused, and after that."""
    model, x = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True)), torch.randn(4, 8, requires_grad=True)
    gc.disable()
    try:
        for _ in range(4):
            y = model(x, torch.randn(4, 8, requires_grad=True).clone())
            written, node = weakref.ref(y), weakref.ref(y.grad_fn)
            del y
            assert written() is None
            assert node() is None
    finally:
        gc.enable()
