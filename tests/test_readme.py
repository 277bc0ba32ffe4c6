"""README and pages tell the truth: tables are the code's, examples run and do what they say."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

import opfuse
from docs import tables
from opfuse import ops, recipes
from opfuse.compiler import rules
from opfuse.config.guards import to_guards
from opfuse.config.load import check
from opfuse.errors import FusionError
from tests.plans import plans_used

ROOT = Path(__file__).resolve().parent.parent
TEXT = tables.README.read_text(encoding="utf-8")
EXAMPLES = ("README.md", *(f"docs/{name}.md" for name in ("tutorial", "torch", "recipes", "ops", "fusions", "conformance")))
"""Pages whose Python blocks run one after another, in this order."""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the Python blocks define, run in order."""
    space: dict[str, Any] = {}
    for page in EXAMPLES:
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(block, page, "exec"), space)
    return space


def test_fragments_of_the_page_on_torch_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names that they begin from, on the CPU: a back end that compiles nothing, and steps without a graph."""
    fragments = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "torch.md").read_text(encoding="utf-8"), re.DOTALL)
    model = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    x, recipe = torch.randn(32, 32, requires_grad=True), recipes.MXFP8BlockScaling()
    with opfuse.quantized_model_init(recipe=recipe):
        stored = ops.Sequential(ops.Linear(32, 32))
    known = {"torch": torch, "opfuse": opfuse, "recipe": recipe, "x": x, "path": tmp_path / "planes.safetensors"}
    known |= {"save_file": save_file, "load_file": load_file}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(opfuse, "graphed_step", lambda step, *parts: step)
    known["batches"] = [(x.detach(), x.detach())] * 2
    small = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads"), 1
    )
    llama = transformers.LlamaModel(transformers.LlamaConfig(**small, num_key_value_heads=1, vocab_size=8))
    wanted = stored.state_dict()["0.weight"].dequantize()
    with opfuse.autocast(recipe=recipe):
        quantized = model(x)
    made = []
    for fragment, begun in zip(fragments, (stored, model, copy.deepcopy(model), llama, model), strict=True):
        space = {**known, "model": begun}
        text = fragment.replace('device="cuda"', 'device="cpu"')
        exec(compile(text, "docs/torch.md", "exec"), space)
        made.append(space.get("loss"))
    assert torch.equal(stored.state_dict()["0.weight"].dequantize(), wanted)
    assert made[0] is None
    assert torch.equal(made[1], quantized)
    assert made[2].isfinite()
    assert llama(torch.ones(1, 4, dtype=torch.int64)).last_hidden_state.isfinite().all()
    assert torch.equal(made[4], model(x))


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rendered(text) == text, "run `python docs/tables.py`"
    assert "<!-- table: " in text


def test_every_table_has_a_page() -> None:
    shown = [name for page in tables.PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(tables.TABLES)


def test_what_the_readme_quotes_is_printed(names: dict[str, Any]) -> None:
    """What is saved and what is fused stands before what is not."""
    (quoted,) = re.findall(r"Eight of the lines it prints on a CPU:\n\n```\n(.*?)```", TEXT, re.DOTALL)
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    with recipes.autocast(recipe=recipes.MXFP8BlockScaling(backward_override="dequantized", keep="recompute")):
        printed = f"{opfuse.saved(names['mlp'], x)}\n{opfuse.explain(names['mlp'], x)}".splitlines()
    lines = quoted.splitlines()
    assert len(lines) == 8
    assert [line for line in printed if line in lines] == lines
    fused, refused = ([line for line in lines if word in line] for word in ("epilogue(", " missed "))
    assert lines.index(fused[-1]) < lines.index(refused[0])


def test_first_example_trains_and_explains(names: dict[str, Any]) -> None:
    assert names["mlp"][1].weight.grad.abs().sum() > 0
    assert names["x"].grad.shape == (128, 256)
    assert names["mlp"].cache_info().plans == 1


def test_activation_example_has_the_right_gradient_and_fuses(names: dict[str, Any]) -> None:
    op = names["Softsign"]()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))
    model = ops.Sequential(ops.Linear(32, 32), op, ops.Linear(32, 32))
    with recipes.autocast(recipe=recipes.MXFP8BlockScaling()), plans_used() as plans:
        model(torch.randn(32, 32))
    fused = [outcome.ops for outcome in plans[0].outcomes if outcome.rule == "epilogue" and outcome.status == "fused"]
    assert any("softsign" in name for places in fused for name in places)


def test_channel_example_adds_the_residual(names: dict[str, Any]) -> None:
    norm, linear = names["norm"], names["block"][2]
    x = torch.randn(4, 64)
    assert torch.equal(names["block"](x), linear(norm(x)) + x)


def test_experts_of_the_example_compute_what_a_loop_over_tokens_does(names: dict[str, Any]) -> None:
    model, x = names["experts"], torch.randn(16, 64)
    gate, up, down = (names[name] for name in ("dispatch", "up", "down"))
    probabilities, chosen = (x @ gate.weight.t()).softmax(-1).topk(2)
    rows = []
    for token, scales, experts in zip(x, probabilities, chosen):
        gated = [getattr(up, f"weight{expert}") @ token for expert in experts]
        inner = [torch.nn.functional.silu(a) * b * scale for (a, b), scale in zip((each.chunk(2) for each in gated), scales)]
        rows.append(sum(getattr(down, f"weight{expert}") @ each for expert, each in zip(experts, inner)))
    torch.testing.assert_close(model(x), torch.stack(rows), atol=1e-5, rtol=1e-4)


def test_own_op_example_has_the_right_gradients(names: dict[str, Any]) -> None:
    op = names["Gain"](8).double()
    assert torch.autograd.gradcheck(op, (torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True),))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    op(x).sum().backward()
    assert torch.allclose(op.gain.grad, x.sum((0, 1)))


def test_fusion_example_fires_and_changes_no_bit(names: dict[str, Any]) -> None:
    from opfuse import register_fusion

    model = ops.Sequential(ops.Linear(16, 16, bias=False), ops.ConstantScale(0.3))
    x = torch.randn(4, 16)
    plain = model(x)
    with register_fusion(names["rule"], prepend=True), plans_used() as plans:
        fused = model(x)
    assert "scaled_linear" in plans[0].fusions
    assert torch.equal(plain, fused)


def test_guards_of_the_page_are_the_same_in_python_and_in_a_file_and_are_all() -> None:
    rows = re.findall(
        r"^\| `(\w+\(.*\))` \| (?:`(.*)`)? ?\| ", (ROOT / "docs" / "fusions.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    functions = {name: getattr(rules, name) for name in rules.TESTS if name != "is"}
    guards = [eval(code, {"torch": torch, "is_": rules.is_, **functions}) for code, _ in rows]
    assert {guard.test for guard in guards} == set(rules.TESTS)
    places = {"linear": ("basic_linear",), "act": ("gelu", "relu")}
    written = [(guard, YAML(typ="safe").load(text)) for guard, (_, text) in zip(guards, rows, strict=True) if text]
    assert len(written) == len(rows) - 1
    assert [to_guards(when, places) for _, when in written] == [(guard,) for guard, _ in written]
    with pytest.raises(FusionError) as told:
        rules.fusion("mine", "linear=basic_linear act=gelu", when=(True,), forward=lambda x, *, linear, act: x)
    assert [word for word in rules.TESTS if word not in str(told.value)] == []


@pytest.mark.parametrize("page", ["howto", "fusions"])
def test_a_file_that_a_page_shows_has_no_findings(page: str, tmp_path: Path) -> None:
    pages = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("howto", page)]
    whole, text = (re.findall(r"```yaml\n(.*?)```", each, re.DOTALL)[0] for each in pages)
    (tmp_path / "my.txt").write_text("to be or not to be")
    (tmp_path / "my.yaml").write_text(text if text == whole else whole + text)  # rules are the end of a file
    assert check(tmp_path / "my.yaml") == ()


def test_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_master_weights_converge_where_an_optimizer_of_stored_weights_stalls(names: dict[str, Any]) -> None:
    """Every weight is to move by 0.01, in steps of about 1e-4 that MXFP8 has no room for."""
    layer, plain = names["layer"], copy.deepcopy(names["layer"])
    generator = torch.Generator().manual_seed(0)
    start = layer.weight.get_high_precision_init_val().clone()
    target = start + 0.01 * torch.randn(start.shape, generator=generator).sign()
    x = torch.randn(256, 256, generator=generator)
    stalling = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    losses: dict[Any, list[float]] = {}
    for model, optimizer in ((plain, stalling), (layer, names["optimizer"])):
        for _ in range(120):
            with recipes.autocast(recipe=recipes.MXFP8BlockScaling()):
                loss = (model(x) - x @ target.T).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(model, []).append(loss.item())
    assert losses[plain][-1] > 0.8 * losses[plain][0]
    assert losses[layer][-1] < 0.3 * losses[layer][0]


def test_two_commands_of_the_readme_set_a_checkout_up() -> None:
    """One runs the quickstart, one the tests, as continuous integration does; make knows both."""
    commands = re.findall(r"^make (\w+)", "\n".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
