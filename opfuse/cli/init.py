"""``opfuse init``: a configuration to begin with."""

from __future__ import annotations

from pathlib import Path

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.errors import OutputError, describe

STARTER = """\
# opfuse check {name}          report errors; --values: show every setting and its source
# opfuse explain {name}        what fuses, what does not, and why
# opfuse run {name}            train it, and the same in high precision
# In your own training loop: config = opfuse.load("{name}"); model = config.build(); config.recipe; config.rules
version: 1

# Named values, used as ${{hidden}}.
parameters: {{hidden: 256, inner: 512}}

# none, fp8_current, fp8_block, mxfp8, nvfp4, delayed, custom: `opfuse doctor` says which are native on this machine.
recipe:
  kind: mxfp8
  # backward_override: dequantized   # or high_precision: what the backward pass multiplies

# Named groups of ops, used as {{use: block}}.
fragments:
  block:
    - residual:  # adds its input to its output
        - {{op: rms_norm, size: "${{hidden}}"}}
        - {{op: linear, in_features: "${{hidden}}", out_features: "${{inner}}"}}
        - {{op: swiglu}}  # halves the columns
        - {{op: linear, in_features: 256, out_features: "${{hidden}}", bias: false}}

pipeline:
  dtype: bfloat16
  ops:
    - repeat: 2
      ops:
        - {{use: block}}
    - {{op: rms_norm, size: "${{hidden}}"}}
    - {{op: linear, in_features: "${{hidden}}", out_features: 256}}

# Fusion rules: restrict one (use, when), disable one (disable), declare one (name, pattern).
fusions:
  level: O2  # O0: no fusion; O1: fusions that change no bit; O2: also those for recipes with rounding: single
  rules:
    - {{use: epilogue, expect: {{fused: 8}}}}  # `opfuse check` verifies this count

# Training text, as bytes; {{kind: text, path: book.txt}} reads your own.
data: {{kind: pydoc_topics, context: 16, embedding: 16}}
train: {{steps: 300, batch_size: 128, learning_rate: 3.0e-3, seed: 0, eval_every: 50}}
# watch: {{every: 100, alarms: {{sqnr: 12}}}}  # figures of casts, in values.jsonl beside the report
"""
"""What the file says; braces are doubled for ``format``."""


def init(path: Path, *, force: bool, as_json: bool) -> None:
    """Write the starter to ``path``. OutputError if it is there already, unless forced, or cannot be written."""
    if path.exists() and not force:
        cure = "name another path, or say --force"
        raise OutputError(describe(str(path), wanted="a path where nothing is", got="a file", cure=cure))
    written(path, STARTER.format(name=path).encode(), "name another path", mode=0o666)
    if as_json:
        echo_json({"wrote": str(path)})
        return
    echo(f"wrote {path}; see `opfuse check {path} --values`, then `opfuse run {path}`")
