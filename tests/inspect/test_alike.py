"""Calls by name are explained as calls by place, and layers that are alike are told once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import opfuse
from opfuse.errors import PipelineError
from opfuse.inspect.alike import aligned, alike, counted, spanned, starred
from opfuse.recipes import Float8CurrentScaling
from tests.convert.blocks import Model


class Named(Model):
    """Takes what it takes by name, and returns a dictionary."""

    def forward(self, *, words, mask=None):
        logits = super().forward(words, mask)
        return {"loss": logits.square().mean(), "logits": logits}


def test_layers_of_a_converted_model_that_is_called_by_name():
    model, words = Named(), torch.randint(48, (2, 16))
    opfuse.fuse_(model, Float8CurrentScaling(), policy={"layers.1.mlp": None})
    found = opfuse.explain(model, words=words, mask=None)
    titles = [line.partition(":")[0] for line in str(found).splitlines() if " autograd node" in line]
    assert titles == ["layers.*.attention.q+k+v ×2", "layers.*.attention.o ×2", "layers.0.mlp"]
    assert len(found.to_dict()["pipelines"]) == 5
    saved = opfuse.saved(model, words=words)
    assert (saved.totals, saved.values) == (found.totals, found.saved)
    assert "words" in {value.memory for value in saved.values}
    lines = [line for line in str(saved).splitlines() if line.startswith("  layers")]
    assert [line for line in lines if line.split()[:4] == ["layers.*.attention.o", "2:basic_linear", "×2", "x"]]
    assert len(lines) < sum(value.op.startswith("layers") for value in saved.values)
    assert {row.pipeline for row in opfuse.host_times(model, words=words, calls=1).rows} >= {"layers.0.mlp"}
    with pytest.raises(PipelineError, match=r"wants inputs, got no tensor\. Cure: pass what the model is called with"):
        opfuse.explain(model)


def test_names_that_differ_by_numbers_alone():
    names = ["a.0.q+a.0.k", "a.1.q+a.1.k", "0", "ops 0..3", "ops 0..3", "2", "a.0.mlp 3:gelu", "ops 0..4"]
    found = [counted(same) for same in alike(names, starred)]
    assert found == ["a.*.q+a.*.k ×2", "* ×2", "ops 0..3 ×2", "a.0.mlp 3:gelu", "ops 0..4"]
    assert Counter(map(starred, ["x.10.y", "x.2.y"])) == {"x.*.y": 2}


def test_rows_are_aligned_by_their_longest_cells():
    rows = [("name", "bytes", "of"), ("a", "1", "x"), ("a longer", "1024", "")]
    assert [*aligned(rows)] == ["name      bytes  of", "a         1      x", "a longer  1024"]
    assert [*aligned(rows, right=(1,))] == ["name      bytes  of", "a             1  x", "a longer   1024"]
    assert [*aligned([])] == []


def test_a_converted_model_in_which_no_op_ran_is_told_why():
    model, words = Named(), torch.randint(48, (2, 16))
    opfuse.fuse_(model, None)
    with pytest.raises(PipelineError, match="a converted Named whose modules ran their own forwards since no recipe is active"):
        opfuse.explain(model, words=words)
    opfuse.unfuse_(model)
    with pytest.raises(PipelineError, match=r"got Named\. Cure: convert the model"):
        opfuse.explain(model, words=words)


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["layers.0.mlp", "layers.2.mlp", "layers.1.mlp", "layers.10.mlp"], "layers.{0-2,10}.mlp ×4"),
        (["layers.3.mlp.0", "layers.5.mlp.0"], "layers.{3,5}.mlp.0 ×2"),
        (["layers.0.mlp.0", "layers.1.mlp.1"], "layers.*.mlp.* ×2"),
        (["mlp", "mlp"], "mlp ×2"),
        (["layers.7.mlp"], "layers.7.mlp"),
    ],
)
def test_names_that_differ_by_one_number_have_its_values(names, label):
    assert spanned(names) == label
