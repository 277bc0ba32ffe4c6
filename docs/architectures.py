"""Writes docs/architectures.md, what ``fuse_`` makes of models of transformers: ``python -m docs.architectures``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import transformers

import opfuse
from docs.tables import table
from opfuse.errors import ConversionError
from tests.convert.tiny import MODELS, tiny

DOCUMENT = Path(__file__).resolve().parent / "architectures.md"

TEXT = """# Models of transformers

What `opfuse.fuse_` makes of {count} classes of transformers {version}, each a tiny model with random weights.
`tests/convert/test_models.py` converts each by a recipe that changes nothing and compares it with the plain model: results, their
dtypes, gradients and random states, in training, in evaluation and under `torch.autocast`. `print(opfuse.fuse_(model))` shows the
same of your model, module by module; [fuse.md](fuse.md#what-is-converted) says more.

- **alone**: linear modules with a product of their own. **q, k, v**: linear modules that share one product.
- **chains**: blocks that run as one pipeline. **gate + up**: those of them that begin with one product of both.
- **experts**: modules whose matrices are grouped products. **norms**: those in chains; alone, a norm is an op if it has at least
  1024 columns, which no tiny model has.
- **left alone**: modules with matrices that stay as they are, and why.

`python -m docs.architectures` writes this page.

{table}
"""

KINDS = {
    "alone": r"Linear",
    "q, k, v": r"Linear×\d+",
    "chains": r"(?!.*(Linear×2|GroupedLinear)).* → .*",
    "gate + up": r".*Linear×2 → .*",
    "experts": r".*GroupedLinear.*",
}
"""What became of a module, by column."""
COLUMNS = (*KINDS, "norms")


def row(name: str, report: opfuse.Report) -> list[str]:
    """The row of a model."""
    counts: Counter[str] = Counter()
    for entry in report.entries:
        counts.update(column for column, text in KINDS.items() if re.fullmatch(text, entry.became))
        counts["norms"] += entry.became.count("Norm")
    left = Counter(re.split("[;,:]| stays", entry.got)[0] for entry in report.entries if entry.weights and not entry.became)
    told = "; ".join(f"{why} ×{count}" if count > 1 else why for why, count in left.items())
    return [name, *(str(counts[column] or "") for column in COLUMNS), told]


def left(name: str, error: ConversionError) -> list[str]:
    """The row of a model that ``fuse_`` leaves alone."""
    return [name, *([""] * len(COLUMNS)), f"all of it{str(error).partition(f'{name} without any')[2].partition('. Cure')[0]}"]


def converted(name: str) -> list[str]:
    """The row of a model that is made for it."""
    try:
        return row(name, opfuse.fuse_(tiny(name)))
    except ConversionError as error:
        return left(name, error)


def document() -> str:
    """The page."""
    rows = table(["model", *COLUMNS, "left alone"], map(converted, MODELS))
    return TEXT.format(count=len(MODELS), version=transformers.__version__, table=rows)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
