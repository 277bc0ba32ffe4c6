"""``opfuse.graphed_step`` without a GPU: what it refuses, with cures; steps that run are in tests/gpu/test_graphed_step.py."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse.errors import PipelineError, UnsupportedError
from tests.ops.test_op_errors import raised


def test_what_is_no_step_or_no_part_of_one():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raised(PipelineError, ValueError, "graphed_step", "a function", "int"):
        opfuse.graphed_step(1, model)
    for parts, got in (((), "no module"), ((optimizer,), "no module"), ((model, optimizer, 1), "an? int")):
        with raised(PipelineError, ValueError, "graphed_step", "modules and optimizers", got):
            opfuse.graphed_step(model, *parts)


def test_what_a_graph_cannot_have():
    model = nn.Linear(2, 2)
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "got cpu"):
        opfuse.graphed_step(model, model)
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "cpu and meta"):
        opfuse.graphed_step(model, model, nn.Linear(2, 2, device="meta"))
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "no parameters"):
        opfuse.graphed_step(model, nn.GELU())
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    with raised(UnsupportedError, RuntimeError, "that no ranks exchange", "DistributedDataParallel"):
        opfuse.graphed_step(model, nn.Sequential(wrapped))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cure is that of a machine without a GPU")
def test_the_cure_without_a_gpu():
    with pytest.raises(UnsupportedError, match="Cure: call the step itself"):
        opfuse.graphed_step(print, nn.Linear(2, 2))
