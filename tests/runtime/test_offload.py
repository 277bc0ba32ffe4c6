"""What a pipeline saves may leave for a file and come back in other memory: gradients have the same bits."""

from __future__ import annotations

import io
import weakref
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops
from opfuse.runtime import offload
from tests.compiler.harness import CASES, Step, differences, mlp, randn, recipe_for, run, to

CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.few(apart=True)
@pytest.mark.row("H25")
@pytest.mark.parametrize(("name", "override"), CASES)
def test_h25_saved_planes_leave_and_come_back_with_the_same_bits(name, override):
    """Every saved tensor becomes bytes, and is made anew from them when the backward pass asks for it."""
    model, x, step = to(mlp(), torch.bfloat16), randn(32, 64), Step(recipe_for(name, override), steps=2)
    left: list[torch.dtype] = []
    memory: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> bytes:
        left.append(tensor.dtype)
        memory.append(tensor)  # alive, so that nothing else can stand at its address
        torch.save(tensor.detach().clone(), file := io.BytesIO())
        return file.getvalue()

    def unpack(data: bytes) -> torch.Tensor:
        back = torch.load(io.BytesIO(data), weights_only=True)
        assert back.untyped_storage().data_ptr() not in {tensor.untyped_storage().data_ptr() for tensor in memory}
        return back

    want = run(model, x, step=step)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = run(model, x, step=step)
    assert differences(got.tensors, want.tensors) == []
    quantized = name != "none" and override != "high_precision"
    assert any(dtype in CODES for dtype in left) == quantized


@pytest.mark.row("H25")
@pytest.mark.parametrize("name", ["none", "fp8_current", "mxfp8"])
def test_h25_a_plane_that_comes_back_with_other_bits_is_read(name):
    """The test above would notice: what is read in the backward pass is what came back, not what was saved."""
    model, x = to(ops.Sequential(ops.Linear(64, 64)), torch.bfloat16), randn(32, 64)
    recipe = recipe_for(name)

    def gradient(unpack) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack),
            opfuse.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = model(leaf)
        return torch.autograd.grad(y, model[0].weight, torch.ones_like(y))[0]

    assert gradient(lambda tensor: tensor).any()
    assert not gradient(torch.zeros_like).any()


class Stream:
    """One of torch.cuda, whose copies are there at once: it notes what waits for what."""

    notes: ClassVar[list[str]] = []

    def __init__(self, device: object = None) -> None:
        self.name = f"stream {id(self)}"

    def wait_stream(self, other: Stream) -> None:
        self.notes.append("copy")

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.notes.append("wait")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams do where the CPU stands for a device."""
    computing = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(offload, "_on_device", lambda tensor: type(tensor) in (torch.Tensor, torch.nn.Parameter))
    monkeypatch.setattr(offload, "_on_host", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    monkeypatch.setattr(Stream, "notes", [])
    return Stream.notes


@pytest.mark.cpu
@pytest.mark.row("H25")
@pytest.mark.parametrize("name", ["none", "delayed", "fp8_block", "nvfp4"])
def test_h25_what_leaves_while_the_device_computes_comes_back_with_the_same_bits(name, notes):
    model, x = to(mlp(), torch.bfloat16), randn(32, 64)
    step = Step(recipe_for(name), steps=2)
    want = run(model, x, step=step)
    assert not notes
    with opfuse.offloaded(model, ahead=100, least=1):
        got = run(model, x, step=step)
    assert differences(got.tensors, want.tensors) == []
    assert notes


@pytest.mark.cpu
def test_tensors_leave_and_come_back_in_order_and_each_once(notes):
    """Each of 400 bytes: one may be on its way out, and one is fetched ahead."""
    layer, x = torch.nn.Linear(10, 10, bias=False), torch.randn(10, 10, requires_grad=True)
    with opfuse.offloaded(layer, ahead=400, least=400):
        a = x.exp()
        b = a * a  # which is kept once, for three readers
        c = b.exp()
        y = layer(c.sin()).sum()  # the weight stays
    assert notes == ["copy", "copy", "wait", "copy", "wait"]  # a and c, whereupon a is let go; the sine, whereupon c is
    notes.clear()
    (grad,) = torch.autograd.grad(y, x)
    assert notes[:3] == ["wait", "wait", "copy"]  # the sine is still there, and c is fetched beside the product
    assert notes[3:] == ["wait", "wait", "copy", "wait", "wait", "wait", "wait"]  # who reads c before another waits for it, too
    torch.testing.assert_close(grad, layer.weight.sum(0) * c.cos() * c * 2 * a * a)


@pytest.mark.cpu
def test_memory_of_the_host_is_used_again_and_no_more_comes_back_than_is_wanted(notes, monkeypatch):
    """Four tensors of 400 bytes, of which two may be on their way in each direction."""
    host, away, made = offload._on_host, opfuse.offloaded(ahead=800, least=400), []
    monkeypatch.setattr(offload, "_on_host", lambda size: made.append(size) or host(size))

    def forward():
        x = torch.rand(10, 10, requires_grad=True)
        with away:
            y = x.exp()
            for _ in range(3):
                y = y.exp()
        notes_of_it = [*notes]
        notes.clear()
        return y.sum(), notes_of_it

    y, first = forward()
    assert first == ["copy", "copy", "copy", "wait", "copy", "wait"]
    y.backward()
    assert notes == ["wait", "wait", "copy", "wait", "wait", "copy", "wait", "wait"]  # one that is there, and one that comes
    del y
    notes.clear()
    y, second = forward()
    assert second == ["wait", "copy"] * 3 + ["wait"] + ["wait", "copy"] + ["wait"]  # for the copy back from the same memory
    assert made == [400] * 4
    del y  # without a backward pass
    assert notes == ["wait", "wait"]  # memory of the device is free once it was copied
    notes.clear()
    passes = [forward()[0] for _ in range(2)]
    passes[1].backward()
    assert notes.count("copy") == 2  # what the other pass saved stays away


@pytest.mark.cpu
def test_a_tensor_that_was_changed_since_it_left_leaves_again(notes):
    """By who saved it first it is not read, else autograd would not allow the change."""
    x, factor = torch.randn(10, 10, requires_grad=True), torch.ones(10, 10)
    with opfuse.offloaded(ahead=400, least=400):
        unread = x * factor
        factor.mul_(2)
        y = (x * factor).exp().exp()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.autograd.grad((x * factor).exp().exp().sum(), x)[0])
    assert unread.grad_fn is not None


class Copies(TorchDispatchMode):
    """Whether memory copied into stands in order."""

    def __init__(self) -> None:
        super().__init__()
        self.in_order: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.in_order.append(args[0].is_contiguous())
        return func(*args, **kwargs or {})


@pytest.mark.cpu
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t[:, :, 1:3].permute(2, 0, 3, 1),
        lambda t: t[:, :, :1].expand(-1, -1, 4, -1),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t[..., ::2],
    ],
    ids=["transposed", "part", "expanded", "channels last", "every other"],
)
def test_copies_of_views_go_to_memory_in_order(view, notes):
    """A copy on a device into any other goes through memory that is not pinned: 37 ms, not 1.2, for 64 MiB, and it waits."""
    x = torch.randn(2, 3, 4, 5)
    leaf = view(x).detach().requires_grad_()
    with Copies() as copies:
        with opfuse.offloaded(ahead=1, least=1):
            y = leaf.exp() * view(x)
        (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert len(copies.in_order) >= 2
    assert all(copies.in_order)
    torch.testing.assert_close(grad, view(x) * view(x).exp())


@pytest.mark.cpu
def test_what_stays_goes_with_its_graph():
    with opfuse.offloaded():
        y = torch.rand(10, requires_grad=True).exp()
    kept = weakref.ref(y)
    del y
    assert kept() is None
