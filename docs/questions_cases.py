"""Code that plants the cases of docs/questions.md which several questions share."""

from __future__ import annotations

PRELUDE = """import torch, opfuse
from opfuse import ops, recipes
from pathlib import Path

def mlp(): return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)).bfloat16()
def batch(rows=32): return torch.randn(rows, 32).bfloat16()
"""
"""All cases begin with it."""

TWO_PLANS = """model, x = mlp(), batch()
with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
    model(x)
with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(backward_override="dequantized")):
    model(x)
"""

TRACED = f"""import os
os.environ["OPFUSE_TRACE"] = "run"  # as in: OPFUSE_TRACE=run python train.py
{TWO_PLANS}"""

RANKS = """import os
os.environ |= {"OPFUSE_TRACE": "run", "WORLD_SIZE": "4"}
from opfuse.runtime import trace
for rank in range(4):  # what four processes do
    os.environ["RANK"] = str(rank)
    trace._writer.cache_clear()
    model, rounding = mlp(), "single" if rank == 2 else "per_op"
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding=rounding)):
        model(batch())
"""

CONFIG = '''Path("mine.yaml").write_text("""version: 1
recipe: {kind: mxfp8, backward_override: dequantized}
pipeline:
  dtype: bfloat16
  ops:
    - {op: rms_norm, size: 64}
    - {op: linear, in_features: 64, out_features: 64}
    - {op: gelu}
    - {op: linear, in_features: 64, out_features: 64}
fusions:
  level: O1
%s""")
'''


def config(rules: str = "  rules: []") -> str:
    """Code that writes mine.yaml with these rules."""
    return CONFIG % rules


KERNELS = """import json
from opfuse.kernels.engine.compiling import Variant, assemble
from opfuse.kernels.engine.cubins import FACTS, cubin_cache, location
kept = cubin_cache(location())
for source, spills in (("amax.cu", 0), ("cast_row.cu", 48)):  # as if they had been compiled
    key = source.encode().hex().ljust(64, "0")
    kept.store(key, source.encode())
    kept.store(key, json.dumps({source[:-3]: {"registers": 40 + spills, "spills": spills, "shared": 0}}).encode(), FACTS)
    kept.store_source(key, assemble(Variant(source)))
"""

TWO_RUNS = '''from opfuse.config import load
from opfuse.train import compare, write_report
for name, recipe in (("one", "%s"), ("two", "%s")):  # opfuse run one.yaml --out one
    Path(name).mkdir()
    text = ("""version: 1
recipe: {kind: RECIPE}
pipeline: {dtype: bfloat16, ops: [{op: linear, in_features: 64, out_features: 64}, {op: gelu}, {op: linear, in_features: 64, out_features: 256}]}
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {steps: 3, batch_size: 32, eval_every: 3}
""").replace("RECIPE", recipe)
    for path in (f"{name}.yaml", f"{name}/config.yaml"):
        Path(path).write_text(text)
    write_report(compare(load(f"{name}.yaml")), Path(name))
'''
