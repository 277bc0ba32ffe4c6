"""docs/pytorch.md tells the truth: its examples run, and the tests that it names and the messages that it quotes are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opfuse.tensors import QuantizedTensor
from opfuse.tensors.masters import stored_in

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


@pytest.mark.cpu
@pytest.mark.row("H35")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_h35_examples_run(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    names: dict[str, Any] = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(block, "docs/pytorch.md", "exec"), names)
        assert isinstance(stored_in(names["model"][1].weight), QuantizedTensor)
        assert torch.allclose(names["layer"].weight.dequantize().flatten(), names["master"], atol=1e-2)
    finally:
        names.clear()
        dist.destroy_process_group()


@pytest.mark.row("H35")
def test_h35_tests_that_rows_name_are_there():
    path = ""
    for file, test in re.findall(r"`([\w/.]*)(?:::(\w+))?`", TEXT):
        if not file.startswith("tests/") and not test:
            continue
        path = file or path
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (path, test)


def test_messages_that_rows_quote_are_those_of_the_code():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "opfuse").rglob("*.py"))
    quoted = re.findall(r'"([^"]+)"', " ".join(re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL).split()))
    assert quoted
    assert [text for text in quoted if text not in code] == []
