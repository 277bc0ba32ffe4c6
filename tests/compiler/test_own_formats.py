"""A format of a user's own, which no kernel knows: cast, multiplied and fused by the definitions, on every device."""

from __future__ import annotations

import math

import pytest
import torch

from opfuse import ops
from opfuse.errors import GemmError
from opfuse.formats import USAGES
from opfuse.fusions import RULES
from opfuse.recipes import CustomRecipe
from opfuse.tensors.gemm import GEMMS, gemm
from opfuse.tensors.quantizers import Float8BlockQuantizer
from tests.compiler.harness import UNFUSED, Step, differences, randn, run, to
from tests.tensors.quantized_samples import Blocks64

SHAPES = {"input": (64, 160), "weight": (96, 160), "grad_output": (64, 96)}
RECIPE = CustomRecipe(qfactory=lambda role: Blocks64())


def operands(name: str, *quantizers):
    """The quantized operands of a product, and fp64 lines of what they hold."""
    what = GEMMS[name]
    both = [quantizer.quantize(randn(*SHAPES[role])) for quantizer, role in zip(quantizers, (what.left, what.right))]
    exact = [each.dequantize(torch.float32, usage).double() for each, usage in zip(both, (what.left_plane, what.right_plane))]
    return both, [x.t() if usage == USAGES[1] else x for x, usage in zip(exact, (what.left_plane, what.right_plane))]


@pytest.mark.parametrize("name", GEMMS)
def test_products_err_as_fp32_sums(name):
    both, (a, b) = operands(name, Blocks64(), Blocks64())
    got = gemm(name, *both, dtype=torch.bfloat16, out_dtype=torch.float32)
    allowed = (2 * math.sqrt(a.shape[1]) + 4) * 2.0**-24 * (a.abs() @ b.abs().t())
    assert float(((got.double() - a @ b.t()).abs() / allowed).max()) < 1


def test_blocks_of_two_lengths_do_not_meet():
    both, (a, b) = operands("fprop", Blocks64(), Float8BlockQuantizer(torch.float8_e4m3fn))
    with pytest.raises(GemmError, match="blocks of one length, got input rowwise blocks64, weight rowwise fp8_block_2d"):
        gemm("fprop", *both, dtype=torch.bfloat16)
    mixed = gemm("fprop", *both, dtype=torch.bfloat16, mixed=True)
    torch.testing.assert_close(mixed.double(), a @ b.t(), rtol=2**-8, atol=1e-4)


def test_no_kernel_that_makes_a_tensor_casts_it():
    assert Blocks64().encoding((64, 160), torch.bfloat16) is None
    assert Float8BlockQuantizer(torch.float8_e4m3fn).encoding((64, 160), torch.bfloat16) is not None


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_r4_fused_pipelines_equal_their_ops(norm):
    model = to(ops.Sequential(norm(160), ops.Linear(160, 192), ops.SwiGLU(), ops.Linear(96, 96), ops.GELU()), torch.bfloat16)
    fused, unfused = (run(model, randn(64, 160), step=Step(RECIPE, rules)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert {rule for plan in fused.plans for rule in plan.fusions} >= {"epilogue", "backward_activation_bias"}
