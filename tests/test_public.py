"""The public names: what they return is short in a terminal, and what they cannot take is refused with a cure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from tests.processes import ran

FP8 = recipes.Float8CurrentScaling()


def pipeline() -> ops.Sequential:
    return ops.Sequential(*(op for _ in range(6) for op in (ops.Linear(8, 8), ops.GELU())))


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(6)))


RETURNED: dict[str, Callable[[], Any]] = {
    "active_rules": opfuse.active_rules,
    "fusion": lambda: opfuse.active_rules().rules[0],
    "explain": lambda: opfuse.explain(pipeline(), torch.randn(8, 8)),
    "saved": lambda: opfuse.saved(pipeline(), torch.randn(8, 8)),
    "host_times": lambda: opfuse.host_times(pipeline(), torch.randn(8, 8)),
    "advise": lambda: opfuse.advise(model()),
    "fuse_": lambda: opfuse.fuse_(model(), FP8),
    "load": lambda: opfuse.load("quickstart"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_terminal_shows_is_short(name: str) -> None:
    """What a call found is told by ``print``, and not by each attribute of each object inside."""
    with opfuse.autocast(recipe=FP8):
        shown = repr(RETURNED[name]())
    assert len(shown) < 700
    assert shown.startswith(type(RETURNED[name]()).__name__ + "(")


X = torch.randn(8, 8)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "support of a number": (lambda: opfuse.support(3), r"support\(recipe=\): wants a Recipe or a text, got 3"),
    "support on a text": (
        lambda: opfuse.support(FP8, "9.0"),
        r"support\(arch=\): wants None or \(an integer, an integer\), got '9.0'",
    ),
    "support on a number": (lambda: opfuse.support_matrix(archs=(9,)), r"support_matrix\(archs=\): wants a list, each part \("),
    "a flag": (lambda: recipes.is_fp8_available(native="yes"), r"is_fp8_available\(native=\): wants True or False, got 'yes'"),
    "a state dict": (lambda: opfuse.to_planes(None), r"to_planes\(state_dict=\): wants a Mapping, got None"),
    "a model for its state": (
        lambda: opfuse.to_planes(model()),
        r"to_planes\(state_dict=\): wants a Mapping, got one Sequential\.",
    ),
    "a model of states": (lambda: opfuse.prepare_delayed("m"), r"prepare_delayed\(model=\): wants an nn.Module, got 'm'"),
    "raw weights": (
        lambda: opfuse.tensors.post_all_gather_processing([X]),
        r"weights=\): wants a list, each part a QuantizedTensor, got",
    ),
    "masters": (lambda: opfuse.master_weights(3), r"master_weights: wants parameters, got an element of type int"),
    "graphs of a tensor": (
        lambda: opfuse.graphed(pipeline(), X),
        r"graphed\(sample_args=\): wants a list, each part a torch.Tensor, got one Tensor of shape \(8, 8\). Cure: put it",
    ),
    "graphs without a GPU": (
        lambda: opfuse.graphed(pipeline(), (X,)),
        "wants CUDA tensors, got one on cpu. Cure: " + ("move" if torch.cuda.is_available() else "call the module itself"),
    ),
    "a path": (lambda: opfuse.dump(None), r"dump\(path=\): wants a text or a Path, got None"),
    "a file": (lambda: opfuse.load(None), r"a path is a text, got NoneType"),
    "an option": (lambda: opfuse.explain(pipeline(), X, overrides=2), r"explain\(overrides=\): wants True or False, got 2"),
    "calls": (lambda: opfuse.host_times(pipeline(), X, calls="5"), r"host_times\(calls=\): wants an integer, got '5'"),
    "a checkpoint": (lambda: opfuse.checkpoint(None, X), "checkpoint: wants a module or a function, got NoneType"),
    "a kind": (lambda: opfuse.advise(model(), kind=None), r"advise\(kind=\): wants text, got None"),
    "no model": (lambda: opfuse.unfuse_(None), r"unfuse_\(model=\): wants an nn.Module, got None"),
    "a class": (
        lambda: opfuse.export_weights(nn.Linear, "deepseek"),
        r"weights\(model=\): wants an nn.Module, got <class",
    ),
    "a layout": (lambda: opfuse.import_weights({}, layout=3), r"import_weights\(layout=\): wants None or text, got 3"),
    "a dtype": (lambda: opfuse.import_weights({}, dtype="bf16"), r"import_weights\(dtype=\): wants a torch.dtype, got 'bf16'"),
    "an order": (
        lambda: opfuse.register_fusion(opfuse.active_rules().rules[0], prepend=1),
        r"prepend=\): wants True or False, got 1",
    ),
    "a group of amaxes": (
        lambda: opfuse.autocast(amax_reduction_group=[0, 1]),
        r"autocast\(amax_reduction_group=\): wants None or a process group of torch.distributed, got list",
    ),
    "a group of ranks": (
        lambda: opfuse.compare_ranks("all"),
        r"compare_ranks\(group=\): wants None or a process group",
    ),
    "modules": (lambda: opfuse.offloaded(None), r"offloaded\(modules=\): wants arguments, each an nn.Module, got \(None,\)"),
    "torchao's keyword": (
        lambda: opfuse.fuse_(model(), FP8, module_filter_fn=lambda module, path: True),
        r"fuse_: wants keywords that it has, got 'module_filter_fn'; did you mean 'filter_fn'\? Cure: write one of",
    ),
    "a keyword of a class": (
        lambda: opfuse.offloaded(model(), head=1),
        r"offloaded: wants arguments of modules, ahead, least, got 'head'",
    ),
    "an index": (lambda: pipeline()["0"], "Sequential index: wants an integer, got '0'"),
    "a place": (lambda: pipeline().insert(None, ops.GELU()), "Sequential index: wants an integer, got None"),
    "no list": (lambda: pipeline() + ops.GELU(), "Sequential: wants a list of modules, got GELU"),
    "a name": (lambda: ops.Sequential({"a.b": ops.GELU()}), "Sequential: wants a name that a submodule can have, got 'a.b'"),
    "keywords of ops": (lambda: pipeline()(X, op_kwargs=[1]), "Sequential op_kwargs: wants a mapping, got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_cannot_take_is_told_with_its_cure(name: str) -> None:
    call, told = REFUSED[name]
    with pytest.raises(opfuse.errors.OpfuseError, match=told) as raised:
        call()
    assert "Cure: " in str(raised.value) or "help" in str(raised.value)


def test_an_argument_too_many_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        opfuse.unfuse_(model(), 3)  # type: ignore[call-arg]


def test_what_is_listed_is_given_as_a_tuple() -> None:
    assert opfuse.support_matrix([[9, 0]]) == opfuse.support_matrix(((9, 0),))  # type: ignore[arg-type, list-item]


MISSPELT = {
    "opfuse.fuse": "fuse_",
    "opfuse.autocst": "autocast",
    "opfuse.explian": "explain",
    "opfuse.recipes.Float8CurentScaling": "Float8CurrentScaling",
    "opfuse.ops.Lineer": "Linear",
    "opfuse.recipes.X": None,
    "opfuse.te.fp8_autocst": "fp8_autocast",
    "opfuse.te.ops.Lineer": "Linear",
}


@pytest.mark.parametrize("wrong", MISSPELT)
def test_a_misspelt_name_is_told_the_right_one(wrong: str) -> None:
    """In the text of the error, which notebooks show."""
    module, _, name = wrong.rpartition(".")
    with pytest.raises(AttributeError, match=rf"^module 'opfuse[.\w]*' has no attribute '{name}'") as raised:
        getattr(import_module(module), name)
    hint = f"; did you mean '{MISSPELT[wrong]}'?" if MISSPELT[wrong] else f"'{name}'"
    assert str(raised.value).endswith(hint)


def test_a_traceback_tells_the_right_name_once() -> None:
    """And not again in words of Python."""
    code = "import opfuse; opfuse.fuze_"
    told = ran(code, check=False).stderr
    assert told.endswith("AttributeError: module 'opfuse' has no attribute 'fuze_'; did you mean 'fuse_'?\n")


def test_completion_offers_public_names_alone() -> None:
    """Those that ``dir`` gives, each of which there is; each name stands in one group, and daily verbs come first."""
    for module in (opfuse, ops, recipes):
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in dir(module))
    names = [name for group in opfuse.GROUPS.values() for name in group]
    assert len(names) == len({*names})
    assert opfuse.__all__[: len(names)] == names
    assert names[:3] == ["fuse_", "unfuse_", "report"]
    elsewhere = {*ops.__all__, *opfuse.tensors.__all__, "is_fp8_available"} - {"register_fusion"}
    assert {*names} & elsewhere == set(), "a name that has a module of its own stands there alone"
