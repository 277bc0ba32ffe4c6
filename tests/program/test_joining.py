"""Launches that become one: which may, and that results are those of the launches one by one."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opfuse.formats import E4M3, NVFP4, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts import block, nvfp4, row, tensor
from opfuse.kernels.engine import compiling, joining
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import Launcher
from opfuse.kernels.engine.variants import parameter_bytes
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import Layout
from opfuse.runtime.replay.batch_launches import joined_launches
from opfuse.runtime.replay.instructions import LaunchStep
from opfuse.runtime.replay.program import Program
from opfuse.runtime.replay.recorder import Recorder
from tests.program.fake import KERNELS, VARIANT, fake_device, launch

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _joins(monkeypatch):
    """The kernels of the fake device read by their first word."""
    monkeypatch.setitem(joining.READ_WORDS, VARIANT.source, (0,))
    with fake_device(monkeypatch):
        yield


def room(size: int = 8) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device="cpu")


def program_of(run, x: Tensor) -> Program:
    recorder = Recorder([x])
    with torch.no_grad(), recorder.recording():
        results = run(x)
    return Program(recorder, [recorder.number(each) for each in results])


def launches(program: Program) -> list[LaunchStep]:
    return program.launches


@pytest.mark.parametrize(
    ("pieces", "wanted"), [(1, [1]), (3, [3]), (joining.JOINED, [joining.JOINED]), (joining.JOINED + 2, [joining.JOINED, 2])]
)
def test_casts_of_the_groups_of_a_tensor_are_one_launch(pieces, wanted):
    def run(x: Tensor) -> list[Tensor]:
        return [launch("double", piece, room()) for piece in x.split(8)]

    program = program_of(run, torch.randn(8 * pieces))
    assert [step.grid.blocks for step in launches(program)] == wanted
    other = torch.randn(8 * pieces)
    assert torch.equal(torch.cat(program([other])), 2 * other)


def written_again(x: Tensor, out: Tensor) -> Tensor:
    return launch("negate", launch("square", launch("double", x, out), room(4)), out)


ORDERS = {
    "one reads what another wrote": (lambda x: [launch("square", launch("square", x, room()), room())], 2),
    "a kernel between reads what was written, and may come later": (
        lambda x: [launch("double", x, first := room()), launch("square", first, room()), launch("double", x, room())],
        2,
    ),
    "each is read by the next of another kind": (
        lambda x: [launch("square", launch("double", each, room(4)), room(4)) for each in x.split(4)],
        2,
    ),
    "an op between reads what a kernel made of what was written": (
        lambda x: [launch("square", launch("double", x, room()), room()) + 1, launch("double", x, room())],
        3,
    ),
    "a third kind writes where the first did": (lambda x: [written_again(each, room(4)) for each in x.split(4)], 3),
    "an op between reads what was written": (lambda x: [launch("double", x, room()) + 1, launch("double", x, room())], 2),
    "an op between writes what was read": (
        lambda x: [launch("double", y := x + 1, room()), y.mul_(3), launch("double", x, room())],
        2,
    ),
    "an op between writes another view of it": (
        lambda x: [launch("double", (y := x + 1)[:4], room(4)), y[2:].mul_(3), launch("double", x, room())],
        2,
    ),
    "an op between has nothing to do with them": (lambda x: [launch("double", x, room()), x + 1, launch("double", x, room())], 2),
    "both write one place": (lambda x: [launch("double", x[:4], y := room()), launch("double", x, y)], 2),
    "one has other threads": (lambda x: [launch("double", x, room()), launch("double", x, room(), threads=64)], 2),
    "nothing": (lambda x: [launch("double", x, room()), launch("double", x, room())], 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_waits_for_another_is_a_launch_of_its_own(name):
    run, count = ORDERS[name]
    program = program_of(run, torch.randn(8))
    assert len(launches(program)) == count
    x = torch.randn(8)
    for got, wanted in zip(program([x.clone()]), run(x.clone()), strict=True):
        assert torch.equal(got, wanted)


def test_what_lies_on_both_sides_of_a_step_of_which_nobody_knows_what_it_reads_is_not_joined():
    x, y = torch.randn(8), torch.randn(8)
    recorder = Recorder([x, y])
    with torch.no_grad(), recorder.recording():
        _ = launch("double", x, room()), y + 1, launch("double", x, room())
    for homes, count in ((recorder.homes, 1), (lambda numbers: None, 2)):
        steps = joined_launches(recorder.steps, homes)
        assert sum(isinstance(step, LaunchStep) for step in steps) == count


def test_random_runs_have_the_results_of_their_launches_one_by_one():
    draw, fewer = random.Random(3), 0
    for _ in range(60):
        choices = [(draw.choice(["launch"] * 4 + ["op", "write"]), draw.choice([*KERNELS]), draw.random()) for _ in range(12)]

        def run(x: Tensor, choices=choices) -> list[Tensor]:
            known = [x + 0, *x.split(4)]
            for kind, entry, where in choices:
                taken = known[int(where * len(known))]
                if kind == "launch":
                    known.append(launch(entry, taken, room(len(taken))))
                elif kind == "op":
                    known.append(taken + 1)
                elif taken is known[0]:
                    taken.mul_(2)
            return known[3:]

        program, x = program_of(run, torch.ones(8)), torch.rand(8)
        fewer += len(launches(program)) < sum(kind == "launch" for kind, *_ in choices)
        for got, wanted in zip(program([x.clone()]), run(x.clone()), strict=True):
            assert torch.equal(got, wanted)
    assert fewer > 20


FORMATS = fp8_block(E4M3, 128), fp8_tensor(E4M3), mxfp8(E4M3), fp8_row(E4M3), NVFP4
KINDS = ("amax", "delayed", "current", "block", "mx", "amax of lines", "lines", "row")
OF_NV = ("nv", "nv, drawn", "nv, squares", "nv, a direction", "nv, chosen", "amaxes of nv")


def cast_noted(kind: str, launch: Launcher) -> None:
    x = torch.zeros(256, 256, dtype=torch.bfloat16)
    layouts = {fmt: [Layout(fmt, usage, tuple(x.shape)) for usage in USAGES] for fmt in FORMATS}
    of_blocks, of_tensor, of_mx, of_lines, of_nv = layouts.values()
    rotated = [of_nv[0], of_nv[1].replace(format=NVFP4.replace(rht=SIGNS))]
    casts: dict[str, Callable[[], object]] = {
        "amax": lambda: tensor.tensor_amax.run(launch, x),
        "delayed": lambda: tensor.cast_recording.run(launch, x, torch.ones(1), torch.zeros(1), of_tensor),
        "current": lambda: tensor.cast_current.run(launch, x, torch.ones(1), of_tensor),
        "block": lambda: block.cast_block.run(launch, x, of_blocks),
        "mx": lambda: tensor.cast_mx.run(launch, x, of_mx),
        "amax of lines": lambda: row.line_amaxes.run(launch, x, USAGES),
        "lines": lambda: row.cast_lines.run(launch, x, [torch.ones(256)] * 2, of_lines),
        "row": lambda: row.cast_row.run(launch, x, of_lines[:1]),
        "nv": lambda: nvfp4.cast_nv.run(launch, x, [torch.ones(1)] * 2, of_nv),
        "nv, drawn": lambda: nvfp4.cast_nv.run(launch, x, [torch.ones(1)] * 2, rotated, seed=torch.zeros(1, dtype=torch.int64)),
        "nv, squares": lambda: nvfp4.cast_nv.run(launch, x, [one := torch.ones(1), one], of_nv, rows=16),
        "nv, a direction": lambda: nvfp4.cast_nv.run(launch, x, [torch.ones(1)], of_nv[:1]),
        "nv, chosen": lambda: nvfp4.cast_nv.run(launch, x, [torch.ones(1)] * 2, of_nv, error="MAE"),
        "amaxes of nv": lambda: nvfp4.amaxes_nv.run(launch, x, rotated),
    }
    casts[kind]()


@pytest.mark.parametrize("kind", [*KINDS, *OF_NV])
def test_a_joined_cast_compiles_without_spills(kind):
    noted: list[Variant] = []
    cast_noted(kind, lambda variant, *_, **__: noted.append(variant))
    (single,) = noted
    once, joined = joining.with_joined(noted), joining.with_joined(noted * 3)
    assert (once, joined) == ([single], [single, joining.joined_variant(single)])
    made = compiling.compile_text(compiling.assemble(joined[1]), "sm_90a", single.source)
    assert [used.spills for used in made.entries.values()] == [0]


def test_casts_with_another_kernel_between_them_are_not_compiled_as_one():
    amax, cast, chain = (
        Variant("amax.cu", ("PARAMETER_BYTES=24",)),
        Variant("cast_tensor.cu", ("PARAMETER_BYTES=72",)),
        Variant("a.cu"),
    )
    assert joining.with_joined([amax, cast, chain, amax, cast]) == [amax, cast, chain]
    both = [joining.joined_variant(each) for each in (amax, cast)]
    assert joining.with_joined([amax, cast, amax, cast, chain]) == [amax, cast, *both, chain]


@pytest.mark.parametrize("source", joining.READ_WORDS)
def test_joined_parameters_fit_into_a_launch(source: str):
    variant = Variant(source, (f"PARAMETER_BYTES={parameter_of(source).layout.size}",))
    assert parameter_bytes(joining.joined_variant(variant)) <= 4096


def test_a_parameter_has_its_parts_and_where_each_begins():
    parameter = joining.joined_parameter([b"12345678", b"abcdefgh", b"ABCDEFGH"], [3, 1, 4])
    assert parameter[: 8 * joining.JOINED] == b"12345678abcdefghABCDEFGH" + bytes(8 * (joining.JOINED - 3))
    words = memoryview(parameter[8 * joining.JOINED :]).cast("I").tolist()
    assert words == [0, 3, 4, *itertools.repeat(0xFFFFFFFF, joining.JOINED - 3)]


def test_launches_that_are_gathered_are_one_for_so_many_of_a_kind():
    """With the parameter of joined launches, as that of a program is; none before the block ends."""
    layout, made = struct.Struct("QIf"), []
    variant, other = Variant("a.cu", ("PARAMETER_BYTES=16", "OUT=bf16")), Variant("a.cu", ("PARAMETER_BYTES=16",))
    fields = [(1 << 40 | i, i, i / 2) for i in range(joining.JOINED + 2)]
    grids = [Grid(i + 1, 64, 512) for i in range(len(fields))]

    def launch(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: float, device: int) -> None:
        made.append((variant, entry, grid, layout.pack(*fields), device))

    with joining.together(launch) as each:
        each(other, "cast", Grid(3, 64), layout, 7, 8, 9.0, device=1)
        for grid, words in zip(grids, fields, strict=True):
            each(variant, "cast", grid, layout, *words, device=0)
        each(variant, "cast", Grid(5, 32, 512), layout, *fields[0], device=0)
        each(variant, "cast", Grid(5, 64, 512), layout, *fields[0], device=1)
        assert made == []
    joined, parts = joining.joined_variant(variant), [layout.pack(*words) for words in fields]
    most = joining.JOINED
    assert joined.defines == (f"PARAMETER_BYTES={20 * most}", "OUT=bf16", f"JOINED={most}")
    full, two = (joining.joined_parameter(parts[some], range(1, most + 3)[some]) for some in (slice(most), slice(most, None)))
    assert made == [
        (other, "cast", Grid(3, 64), layout.pack(7, 8, 9.0), 1),
        (joined, "cast", Grid(sum(range(1, most + 1)), 64, 512), full, 0),
        (joined, "cast", Grid(2 * most + 3, 64, 512), two, 0),
        (variant, "cast", Grid(5, 32, 512), parts[0], 0),
        (variant, "cast", Grid(5, 64, 512), parts[0], 1),
    ]


def test_launches_of_a_block_that_breaks_off_are_not_made():
    made = []

    def broken() -> None:
        with joining.together(lambda *launch, **_: made.append(launch)) as each:
            each(VARIANT, "cast", Grid(1, 64), struct.Struct("Q"), 1, device=0)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert made == []
