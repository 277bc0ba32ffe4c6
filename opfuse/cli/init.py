"""``opfuse init``: a configuration to begin with."""

from __future__ import annotations

from pathlib import Path

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.errors import OutputError, describe

STARTER = """\
# opfuse check {name}          what is wrong here, if anything; --values: what every setting comes to
# opfuse explain {name}        what fuses, what does not, and why
# opfuse run {name}            train it beside high precision
# In a loop of your own: config = opfuse.load("{name}"); model = config.build(); config.recipe; config.rules
version: 1

# Values with a name; ${{hidden}} is written where one is meant.
parameters: {{hidden: 256, inner: 512}}

# none, fp8_current, fp8_block, mxfp8, nvfp4, delayed, custom: `opfuse doctor` says which are native on this machine.
recipe:
  kind: mxfp8
  # backward_override: dequantized   # or high_precision: what the backward pass multiplies

# Ops under a name, for {{use: block}}.
fragments:
  block:
    - residual:  # what goes in is added to what comes out
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

# Rules: narrow one (use, when), switch one off (disable), declare one (name, pattern).
fusions:
  level: O2  # O0: none; O1: those that change no bit; O2: also those that recipes with rounding: single allow
  rules:
    - {{use: epilogue, expect: {{fused: 8}}}}  # `opfuse check` counts

# Bytes of a text; {{kind: text, path: book.txt}} reads one of your own.
data: {{kind: pydoc_topics, context: 16, embedding: 16}}
train: {{steps: 300, batch_size: 128, learning_rate: 3.0e-3, seed: 0, eval_every: 50}}
# watch: {{every: 100, alarms: {{sqnr: 12}}}}  # what casts do to values: values.jsonl beside the report
"""
"""What the file says; braces are doubled for ``format``."""


def init(path: Path, *, force: bool, as_json: bool) -> None:
    """Write the starter to ``path``. OutputError if it is there already, unless forced, or cannot be written."""
    if path.exists() and not force:
        cure = "name another path, or say --force"
        raise OutputError(describe(str(path), wanted="a path where nothing is", got="a file", cure=cure))
    written(path, STARTER.format(name=path).encode(), "name another path")
    if as_json:
        echo_json({"wrote": str(path)})
        return
    echo(f"wrote {path}; see `opfuse check {path} --values`, then `opfuse run {path}`")
