"""Writes docs/trace.md, one call followed through the packages with its values: ``python -m docs.trace``; a test compares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import opfuse
from docs.tables import table
from opfuse import ops, recipes
from opfuse.compiler.plan import Plan
from opfuse.events import PlanUsed, collected
from opfuse.formats import ROWWISE
from opfuse.kernels.chains.cast import forward_chain_cast
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.numerics.activations import BIAS, GELU
from opfuse.numerics.chain import Stage
from opfuse.runtime.replay.program import Program
from opfuse.runtime.replay.replayable import Recorded
from opfuse.tensors.quantizers import MXFP8Quantizer

DOCUMENT = Path(__file__).resolve().parent / "trace.md"
ROWS, WIDTH = 32, 64
SHOWN, LINES = 4, 14

TEXT = """# One call, traced

This page follows one training call of a pipeline under MXFP8, from the user's code to the text of a kernel, with real values.
They are those of a CPU. `python -m docs.trace` writes this page; [architecture.md](architecture.md#how-a-call-runs) has the steps
in general, the [glossary](glossary.md) the terms.

```py
torch.manual_seed(0)
model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)).bfloat16()
x = torch.randn(32, 64).bfloat16().requires_grad_()
with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
    y = model(x)
```

## 1. The key (`runtime/fuser.py`, `compiler/plan.py`)

Everything that the plan may depend on. A call with an equal key finds the plan; if a key differs, a report names the value:

{key}

## 2. The lowered graph (`compiler/lower.py`)

Each `Linear` becomes a product, `basic_linear`, and a `bias`. Around each product are quantize nodes: of the input, of the
weight, and of the output's gradient. The last acts in the backward pass only, so it does not change the value's number.

{graph}

## 3. Claims (`compiler/cover.py`, `fusions/`)

The rules that fired, and the nodes that they took; nodes that no rule takes run alone. All of them are one segment, that is one
autograd node, because quantized values flow between them.

{groups}

## 4. The run (`runtime/interpret/interpreter.py`, `tensors/`, `numerics/`)

The interpreter runs the groups in order. Node 0 casts the input in blocks of 32 elements with one E8M0 scale
(`numerics/scales.py`, `numerics/scalars.py`). The first {shown} elements of the first block:

{cast}

Value 5 is the output of GELU, value 9 the result:

{values}

The second call with the same shapes is recorded as it runs; from the third on the recording is repeated
(`runtime/replay/dispatch.py`): torch ops and kernel launches in a straight line, with addresses filled in.
`runtime/replay/codegen.py` writes that line as a function of Python, which lets go of each tensor after its last reader. On a
GPU this one launches kernels; on a CPU, where the definitions of `numerics/` run, it has {lines} lines. The first are the cast of
node 0, the last returns the result and what is saved for the backward pass:

```text
{line}
```

{constants}

## 5. The kernel (`kernels/chains/`)

On a GPU, nodes 4 to 6 run as one kernel. Its text is generated from the ops' declared expressions (`kernels/chains/text.py`),
replaces `generated.cuh` in `cuda/chain_tile.cu`, and is compiled once for this structure; shapes, addresses and constants are
its parameter. Tests compare the launch (`kernels/chains/cast.py`) with `numerics/`, to 1 unit in the last place where an op
uses an exponential, as GELU does:

{launch}

```cuda
{cuda}```
"""


def _plan() -> tuple[Plan, ops.Sequential, torch.Tensor, torch.Tensor]:
    """The plan of the call, the model, its input and its result; three training calls were made."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)).bfloat16()
    x = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_()
    with collected(PlanUsed) as used, opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        for _ in range(3):
            y = model(x)
    return used[-1].plan, model, x.detach(), y.detach()


def _key(plan: Plan) -> Iterator[Sequence[object]]:
    env = plan.key.env
    yield "env.recipe", f"`{env.recipe}`"
    yield "env.backward_override", env.recipe.backward_override
    yield "env.device, env.arch", f"{env.device}, {env.arch}"
    yield "env.rows_class", f"{env.rows_class}, the greatest common divisor of rows and 128"
    yield "env.aligned, env.level", f"{env.aligned}, {env.level}"
    yield "ops", "a digest of the ops' hyper-parameters and channels"
    yield "inputs", "dtype and wish for a gradient of the input and of each parameter; sizes of parameters"
    yield "rules", "a digest of the active rules"


def _nodes(plan: Plan) -> Iterator[Sequence[object]]:
    for node in plan.graph.nodes:
        yield f"`{node.name}`", _numbers(node.inputs, node.operands), _numbers(node.outputs)


def _groups(plan: Plan) -> Iterator[Sequence[object]]:
    (segment,) = plan.segments
    for direction, groups in (("forward", segment.forward), ("backward", segment.backward)):
        for group in groups:
            names = " ".join(f"`{plan.graph.nodes[i].name}`" for i in group.nodes)
            yield direction, names, group.rule.name if group.rule else "alone"


def _cast(x: torch.Tensor) -> Iterator[Sequence[object]]:
    quantized = MXFP8Quantizer(columnwise=False)(x)
    plane = quantized.record.plane(ROWWISE)
    yield "x[0, :4]", *x[0, :SHOWN].tolist()
    yield "largest of the 32", x[0, :32].abs().max().item(), "", "", ""
    yield "E8M0 byte of the scale", plane.scale.flatten()[0].item(), "", "", ""
    yield "E4M3 codes", *plane.data[0, :SHOWN].view(torch.uint8).tolist()
    yield "decoded", *quantized.dequantize()[0, :SHOWN].tolist()


def _values(model: ops.Sequential, x: torch.Tensor, y: torch.Tensor) -> Iterator[Sequence[object]]:
    with torch.no_grad(), opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        hidden = model[1](model[0](x))
    yield "value 5 [0, :4]", *hidden[0, :SHOWN].tolist()
    yield "value 9 [0, :4]", *y[0, :SHOWN].tolist()


def _program(plan: Plan) -> Program:
    """The program of the forward pass."""
    (made,) = (each for looks in plan.programs.values() for each in looks.values() if isinstance(each, Recorded))
    return made.program


def _constants(program: Program, shown: str) -> Iterator[Sequence[object]]:
    for name in dict.fromkeys(re.findall(r"\bc\d+\b", shown)):
        value = program.constants[name]
        yield f"`{name}`", f"`{getattr(value, '__name__', value)}`"


def _launched() -> tuple[Variant, str, Grid]:
    """The kernel that the epilogue launches, told by a launcher that launches nothing."""
    told: list[tuple[Variant, str, Grid]] = []

    def record(variant: Variant, entry: str, grid: Grid, *_: object, **__: object) -> None:
        told.append((variant, entry, grid))

    x, bias = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH, dtype=torch.bfloat16)
    encoding = MXFP8Quantizer().encoding(x.shape, x.dtype)
    if encoding is None:
        raise TypeError("MXFP8 has no encoding")
    forward_chain_cast.run(record, x, (Stage(BIAS, {"bias": bias}), Stage(GELU)), encoding, keep=(1,))
    return told[0]


def _launch(variant: Variant, entry: str, grid: Grid) -> Iterator[Sequence[object]]:
    yield "source", f"`cuda/{variant.source}`, entry `{entry}`"
    yield "defines", " ".join(f"`{define}`" for define in variant.defines)
    yield "grid", f"{grid.blocks} block of {grid.threads} threads"


def document() -> str:
    """The page."""
    plan, model, x, y = _plan()
    variant, entry, grid = _launched()
    program = _program(plan)
    lines = program.text.split("\n")
    first = "\n".join(lines[:LINES])
    return TEXT.format(
        lines=len(lines),
        line="\n".join([first, "    ...", lines[-1]]),
        constants=table(("constant", "value"), _constants(program, first)),
        shown=SHOWN,
        key=table(("leaf", "value"), _key(plan)),
        graph=table(("node", "reads", "writes"), _nodes(plan)),
        groups=table(("pass", "nodes", "rule"), _groups(plan)),
        cast=table(("", "0", "1", "2", "3"), _cast(x)),
        values=table(("", "0", "1", "2", "3"), _values(model, x, y)),
        launch=table(("", ""), _launch(variant, entry, grid)),
        cuda=variant.generated,
    )


def _numbers(values: Sequence[int], operands: Sequence[tuple[str, int]] = ()) -> str:
    return ", ".join([*map(str, values), *(f"{name} {value}" for name, value in operands)]) or "-"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
