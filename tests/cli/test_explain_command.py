"""``opfuse explain`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opfuse.cli import main

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")


def test_json_is_one_object_with_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for side in ("forward", "backward"):
        assert found[side]
        for outcome in found[side]:
            assert {"rule", "status", "ops"} <= set(outcome)
            assert outcome["status"] != "missed" or {"guard", "wanted", "got"} <= set(outcome)
    assert any(outcome["status"] == "fused" for outcome in found["backward"])


@pytest.mark.parametrize(("format", "start"), [("text", "recipe   MXFP8"), ("mermaid", "%% ops")])
def test_formats(format: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--format", format]) == 0
    assert capsys.readouterr().out.startswith(start)


def test_why_not_shows_one_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--why-not", "linear_add", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {outcome["rule"] for outcome in found["forward"]} == {"linear_add"}
    assert found["backward"] == []


def test_why_not_tells_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--why-not", "linear_add"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "  rules"
    assert lines[-1].startswith("  to fire  at 16:basic_linear 18:add_extra_input: add.in_place has to be True, and is False")
    assert "missed" in lines[-2]
    assert not any(word in line for line in lines for word in ("saved", "products"))


def test_unknown_rule_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--why-not", "linear_ad"]) == 1
    assert "did you mean 'linear_add'" in capsys.readouterr().err
