"""The memory of a training step, estimated on the meta device: against a run with memory, against the record of an H200."""

from __future__ import annotations

import copy
import dataclasses
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse import ops, recipes
from opfuse.cli.app import main
from opfuse.errors import ConversionError, UnsupportedError
from opfuse.inspect.ledger import Ledger, curve
from opfuse.inspect.step_memory import Memory
from opfuse.kernels.engine.launch import standing_for
from opfuse.kernels.engine.registry import kernels, tensors_in
from opfuse.torch_private.tensors import number_of
from tests.kernels.catalogue import CASES
from tests.turns import in_turn

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORD = {(row["name"], row["unit"]): row["value"] for row in json.loads((RESULTS / "h200.json").read_text())["results"]}
BF16 = torch.bfloat16
MIB, GIB = 2**20, 2**30
WIDTH, ROWS = 128, 256
FP8 = recipes.Float8CurrentScaling()


class Counted(TorchDispatchMode):
    """Bytes of what ops have made and what is alive, beside ``others``, and the most of them at once."""

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.others = {number_of(each.untyped_storage()) for each in others}
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage()
            if (number := number_of(storage)) not in self.sizes and number not in self.others:
                self.sizes[number] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, number)
        self.most = max(self.most, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(self.sizes.values())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """Layers one after the other, and a head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def on(device: str, layers: int = 3) -> tuple[Model, torch.Tensor]:
    with torch.device(device):
        return Model(layers).to(BF16), torch.zeros(ROWS, WIDTH, dtype=BF16).requires_grad_()


def estimated(**options: Any) -> Memory:
    model, x = on("meta", options.pop("layers", 3))
    return opfuse.memory(model, x, **options)


def llama(**changed: Any) -> tuple[nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers", reason="of the extra `test`")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
    config = transformers.LlamaConfig(**sizes, **changed, use_cache=False)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=BF16), torch.zeros(2, 512, dtype=torch.int64)


# -- plain torch ------------------------------------------------------------------------------------------------------------


def test_a_step_of_torch_takes_what_a_run_with_memory_takes() -> None:
    model, x = on("cpu")
    with Counted((x, *model.parameters())) as counted:
        y = model(x)
        saved = counted.now - y.nbytes
        torch.autograd.backward(y, y.detach())
        del y
    found = estimated(optimizer="none")
    slack = 512 * 40  # a few vectors, each of which fills no block
    assert saved <= found.saved <= saved + slack
    assert counted.most <= found.peak - sum(found.held.values()) <= counted.most + slack
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert gradients <= found.gradients <= gradients + slack


def test_parts_add_up() -> None:
    for options in ({}, {"world": 4}, {"main_grads": True, "optimizer": "adamw_masters"}, {"checkpointing": "layers"}):
        found = estimated(recipe=FP8, **options)
        assert sum(found.at_peak.values()) == found.peak
        for part, total in (("weights", found.held["weights"]), ("gradients", found.gradients), ("saved", found.saved)):
            assert sum(getattr(layer, part) for layer in found.layers) == total
        assert sum(layer.optimizer for layer in found.layers) == found.held["optimizer"]
        assert max(size for _, size in found.timeline) <= found.peak <= found.first_peak
        assert json.loads(json.dumps(found.to_dict()))["peak"] == found.peak


def test_a_layer_is_told_by_its_path_and_alike_ones_share_a_line() -> None:
    found = estimated(recipe=FP8, layers=4)
    assert [layer.path for layer in found.layers][:5] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    text = str(found)
    assert "layers.* ×4" in text
    assert "backward of " in text
    assert found.place.startswith("backward of ")


def test_a_call_leaves_no_trace() -> None:
    model, x = on("meta")
    model.head.weight.grad = before = torch.zeros_like(model.head.weight)
    forwards = [layer.forward for layer in model.layers]
    opfuse.memory(model, x, recipe=FP8, checkpointing="layers")
    opfuse.memory(model, x, checkpointing="layers")
    assert model.head.weight.grad is before
    assert x.grad is None
    assert [layer.forward for layer in model.layers] == forwards
    assert not any("forward" in vars(module) for module in model.modules())


# -- settings ---------------------------------------------------------------------------------------------------------------


def test_saved_is_what_saved_says() -> None:
    with torch.device("meta"):
        block = ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 512), ops.GELU(), ops.Linear(512, WIDTH)).to(BF16)
        x = torch.zeros(ROWS, WIDTH, dtype=BF16).requires_grad_()
    for keep in (None, "recompute", "quantized"):
        recipe = FP8.replace(keep=keep)
        found = opfuse.memory(block, x, recipe=recipe, optimizer="none")
        with opfuse.autocast(recipe=recipe):
            told = opfuse.saved(block, x)
        assert told.totals.own <= found.saved <= told.totals.own + 512 * len(told.values)


def test_layers_narrower_than_a_block_have_an_estimate() -> None:
    """torch's function of sizes refuses products of sums shorter than a block of 128, which the library takes."""
    with torch.device("meta"):
        block = ops.Sequential(ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64)).to(BF16)
        x = torch.zeros(ROWS, 64, dtype=BF16).requires_grad_()
    recipe = recipes.Float8BlockScaling()
    found = opfuse.memory(block, x, recipe=recipe, optimizer="none")
    with opfuse.autocast(recipe=recipe):
        told = opfuse.saved(block, x)
    assert told.totals.own <= found.saved <= told.totals.own + 512 * len(told.values)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("none", 0), ("sgd", 0), ("sgd_momentum", 2), ("adamw", 4), ("adamw_masters", 12), ("adamw8bit", 2)],
)
def test_the_states_of_an_optimizer(optimizer: str, bytes_each: int) -> None:
    model, _ = on("meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert estimated(optimizer=optimizer).held["optimizer"] == pytest.approx(bytes_each * count, rel=0.06, abs=1)


def test_states_of_8_bits_are_those_of_torchao() -> None:
    optim = pytest.importorskip("torchao.optim", reason="of the extra `test`")
    with torch.device("cpu"):
        model = nn.Linear(512, 512, bias=False, dtype=BF16)
    optimizer = optim.AdamW8bit(model.parameters())
    made = [optimizer._new_buffer(model.weight, signed) for signed in (True, False)]
    wanted = sum(getattr(each, name).nbytes for each in made for name in ("codes", "scale", "qmap"))
    with torch.device("meta"):
        found = opfuse.memory(
            nn.Linear(512, 512, bias=False, dtype=BF16), torch.zeros(16, 512, dtype=BF16), optimizer="adamw8bit"
        )
    assert found.held["optimizer"] == wanted


def test_ranks_hold_parts_and_gather_layers() -> None:
    one, two = (estimated(recipe=FP8, world=world, layers=8) for world in (1, 2))
    for part in ("weights", "optimizer"):
        assert two.held[part] == pytest.approx(one.held[part] / 2, rel=0.02)
    assert two.gradients == pytest.approx(one.gradients / 2, rel=0.02)
    assert two.saved == one.saved
    layer, head = one.layers[0].weights, one.layers[8].weights
    assert one.at_peak["gathered"] == 0
    assert two.at_peak["gathered"] in (head + layer, head + 2 * layer)
    assert two.peak < one.peak


def test_a_checkpointed_layer_saves_its_input() -> None:
    plain, less = (estimated(recipe=FP8, checkpointing=way, optimizer="none") for way in ("none", "layers"))
    assert less.saved < 0.4 * plain.saved
    inputs = ROWS * WIDTH * 2
    assert [layer.saved for layer in less.layers][:2] == [inputs, inputs]
    assert less.peak < plain.peak


def test_main_gradients_are_there_all_the_time() -> None:
    plain, main_ = (estimated(optimizer="adamw_masters", main_grads=wanted) for wanted in (False, True))
    model, _ = on("meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert main_.held["main gradients"] == pytest.approx(4 * count, rel=0.02)
    assert plain.held["main gradients"] == 0


# -- budgets ----------------------------------------------------------------------------------------------------------------


def test_what_is_proposed_fits_and_is_estimated_in_the_same_way() -> None:
    model, ids = llama()
    step = {"input_ids": ids, "labels": ids, "recipe": "fp8_current"}
    found = opfuse.memory(model, **step, budget=10**12)
    assert found.fits
    assert found.proposals == ()
    assert "exceeded by 1 byte" in str(opfuse.memory(model, **step, budget=found.most - 1))
    told = opfuse.memory(model, **step, budget=int(0.7 * found.most))
    assert not told.fits
    assert told.proposals[-1].fits
    assert [each.fits for each in told.proposals[:-1]] == [False] * (len(told.proposals) - 1)
    peaks = [each.peak for each in told.proposals]
    assert peaks == sorted(peaks, reverse=True)
    assert told.proposals[0].change == 'loss="fused"'
    changed: dict[str, Any] = dict(step)
    for each in told.proposals:
        name, _, value = each.change.partition("=")
        if name == "keep":
            changed["recipe"] = FP8.replace(keep=json.loads(value))
        else:
            changed[name] = json.loads(value)
        again = opfuse.memory(model, **changed, budget=told.budget)
        assert (again.most, again.fits) == (each.peak, each.fits)


def test_budgets_are_numbers_or_texts() -> None:
    for text, size in (
        ("80GiB", 80 * GIB),
        ("80 GB", 80 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("512MiB", 512 * MIB),
        (7 * GIB, 7 * GIB),
    ):
        assert estimated(budget=text).budget == size
    with pytest.raises(ConversionError, match=r"memory\(budget=\): wants bytes, or a text such as 80GiB, got '80 apples'"):
        estimated(budget="80 apples")


@pytest.mark.parametrize("policy", [{"model.layers.0": None}, {"lm_head": "default"}])
def test_a_policy_is_that_of_the_conversion(policy: Any) -> None:
    """The estimate is that of the model that the policy has converted, and of no other; with its head, that of its fused loss."""
    model, ids = llama()
    step = {"input_ids": ids, "labels": ids}
    loss: Any = "fused" if "lm_head" in policy else "own"
    found, other = (opfuse.memory(model, **step, recipe="fp8_current", loss=loss, policy=each) for each in (policy, None))
    converted = copy.deepcopy(model)
    opfuse.fuse_(converted, FP8, pack=True, loss=loss, policy=policy)
    assert (found.peak, found.saved) == ((again := opfuse.memory(converted, **step)).peak, again.saved)
    assert (found.peak, found.saved) != (other.peak, other.saved)


# -- what is refused --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    model, x = on("meta")
    refused: dict[str, Callable[[], Any]] = {
        "memory: wants an nn.Module, got int": lambda: opfuse.memory(3, x),
        r"memory: layers.0.norm.weight: wants a tensor on the meta device": lambda: opfuse.memory(on("cpu")[0], x),
        "memory: input 0: wants a tensor on the meta device": lambda: opfuse.memory(model, torch.zeros(2, WIDTH, dtype=BF16)),
        r"optimizer=\): wants an optimizer .*, got 'adamw8bits'; did you mean 'adamw8bit'": lambda: opfuse.memory(
            model, x, optimizer="adamw8bits"
        ),
        r"memory\(world=\): wants a positive integer": lambda: opfuse.memory(model, x, world=0),
        r"memory\(checkpointing=\): wants": lambda: opfuse.memory(model, x, checkpointing="all"),
        "wants a model that calls the elements of a list of layers": lambda: opfuse.memory(
            nn.Linear(WIDTH, WIDTH, device="meta", dtype=BF16), x, checkpointing="layers"
        ),
        "wants a tensor with a gradient": lambda: opfuse.memory(nn.Identity(), x.detach()),
        r"memory\(policy=\): wants a recipe and a model to convert": lambda: opfuse.memory(model, x, policy={"layers": None}),
        "wants a model to convert": lambda: opfuse.memory(ops.Linear(WIDTH, WIDTH, device="meta", dtype=BF16), x, loss="fused"),
    }
    for wanted, call in refused.items():
        with pytest.raises(ConversionError, match=wanted):
            call()
    with pytest.raises(opfuse.errors.RecipeError, match=r"wants a recipe, got 'fp8'"):
        opfuse.memory(model, x, recipe="fp8")


class Reads(nn.Module):
    """Reads a value on the host: one that follows from no input, or one of the input."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own, self.layer = own, nn.Linear(WIDTH, WIDTH, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x), device=x.device) if self.own else x[:, 0].long()
        y: torch.Tensor = self.layer(x) if (places.diff() == 1).all() else x
        return y


def test_values_that_follow_from_no_input_are_known() -> None:
    _, x = on("meta")
    with torch.device("meta"):
        assert opfuse.memory(Reads(own=True), x).gradients > 0
        with pytest.raises(UnsupportedError, match="wants values that the host can read, got a meta tensor"):
            opfuse.memory(Reads(own=False), x)


# -- what stands for a GPU --------------------------------------------------------------------------------------------------


def test_attention_and_norms_save_what_they_save_on_a_gpu() -> None:
    def saved_by(call: Callable[[torch.Tensor], torch.Tensor]) -> int:
        x = torch.zeros(1, 4, 512, 64, dtype=BF16, device="meta").requires_grad_()
        ledger = Ledger({})
        ledger.known(x)
        with ledger.following():
            y = call(x)
            made = sum(block.size for block in ledger.alive())
            torch.autograd.backward(y, y.detach())
        return made

    size = 4 * 512 * 64 * 2
    assert saved_by(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)) < 1.2 * size
    assert saved_by(lambda x: F.rms_norm(x, (64,))) < 1.2 * size
    mask = torch.ones(512, 512, dtype=torch.bool, device="meta")
    assert saved_by(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)) < 1.2 * size + 2 * 512 * 512
    assert saved_by(lambda x: F.scaled_dot_product_attention(x.float(), x.float(), x.float())) < 8.2 * size
    x = torch.zeros(2, 4, 8, 16, device="meta")
    assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
    assert F.rms_norm(x, (16,)).shape == x.shape


def _moved(value: Any) -> Any:
    """Arguments without memory."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _moved(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_moved, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_moved, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: _moved(each) for name, each in changed.items()})
    return value


def _shapes(value: Any) -> Sequence[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(value)]


@pytest.mark.parametrize("kernel", [*kernels()], ids=lambda kernel: kernel.name)
def test_a_launch_without_memory_makes_what_the_definition_makes(kernel: Any) -> None:
    for case in [*CASES[kernel].values()][:3]:
        given = case(torch.device("cpu"))
        args, named = _moved(tuple(given.args)), _moved(dict(given.kwargs))
        with standing_for((9, 0), (13, 0)):
            found = kernel(*args, **named)
        assert _shapes(found) == _shapes(kernel.reference(*given.args, **given.kwargs))


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4}], ids=str)
def test_a_head_with_its_loss_takes_the_logits_of_one_chunk_alone(options: dict[str, float]) -> None:
    """Their gradient lies in their memory, is not copied for products, and is gone before the next logits are made."""
    rows, features, words, chunk = 4096, 64, 32768, 1024
    with torch.device("meta"):
        op = opfuse.ops.LinearCrossEntropy(features, words, chunk=chunk, dtype=BF16, **options)
        x, targets = torch.zeros(rows, features, dtype=BF16).requires_grad_(), torch.zeros(rows, dtype=torch.int64)
    found = opfuse.memory(opfuse.ops.Sequential(op), x, targets, optimizer="none")
    taken, logits, dw = found.first_peak - sum(found.held.values()), 4 * chunk * words, 4 * words * features
    assert logits + dw <= taken <= logits + dw + 4 * MIB


def test_a_quantized_head_takes_the_codes_of_one_chunk_beside_its_logits() -> None:
    """A gradient is cast where the logits were, and gone before the products that read its codes."""
    rows, features, words, chunk = 4096, 128, 32768, 1024
    with torch.device("meta"):
        op = opfuse.ops.LinearCrossEntropy(features, words, chunk=chunk, quantized=True, dtype=BF16)
        x, targets = torch.zeros(rows, features, dtype=BF16).requires_grad_(), torch.zeros(rows, dtype=torch.int64)
    found = opfuse.memory(opfuse.ops.Sequential(op), x, targets, optimizer="none", recipe="fp8_current")
    taken = found.first_peak - sum(found.held.values())
    logits, codes, dw, weight = 4 * chunk * words, 2 * chunk * words, 4 * words * features, 2 * words * features
    assert logits + codes + dw <= taken <= logits + codes + dw + weight + 4 * MIB


# -- the record -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", in_turn(["eager bf16", "delayed called", "fp8_block called", "fp8_current called"], of=2))
def test_layers_take_what_was_measured(kind: str) -> None:
    """Four layers of Llama 3 8B, as benchmarks/converted.py measured them."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    from benchmarks.converted import LLAMA, batch, label_of
    from benchmarks.converted import llama as layers

    sizes = LLAMA.sizes
    x = torch.zeros(*batch(sizes.tokens), sizes.hidden, dtype=BF16, device="meta").requires_grad_()
    recipe = None if "bf16" in kind else kind.partition(" ")[0]
    found = opfuse.memory(layers(LLAMA, "meta"), inputs_embeds=x, recipe=recipe, optimizer="none")
    name = f"{label_of(LLAMA)}, {kind}, memory"
    assert found.saved / MIB == pytest.approx(RECORD[name, "MiB saved"], rel=0.01)
    assert (found.peak - sum(found.held.values())) / MIB == pytest.approx(RECORD[name, "MiB peak"], rel=0.01)


def test_a_mixture_of_experts_takes_what_was_measured() -> None:
    """Two layers of Mixtral's shape; packed, an estimate lacks what joint weights of query, key and value save there, 48 MiB."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    from benchmarks.memory_estimates import CASES as ESTIMATED
    from benchmarks.memory_estimates import name_of

    assert len({*map(name_of, ESTIMATED)}) == len(ESTIMATED) >= 10
    case = dataclasses.replace(next(case for case in ESTIMATED if case.of == "Mixtral"), tokens=16384)
    measured = RECORD["two layers of Mixtral, 16384 tokens, fp8_current called, saved", "MiB"]
    assert case.estimate().saved / MIB == pytest.approx(measured - 48, rel=0.001)


def test_a_step_takes_what_was_measured() -> None:
    """The whole step of 1.1 B parameters of benchmarks/pretrain.py, which torch compiles layer by layer."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    from benchmarks.pretrain import Settings
    from benchmarks.pretrain import llama as language_model

    runs = json.loads((RESULTS / "pretrain_h200.json").read_text())["runs"]
    run = next(run for run in runs if run["settings"]["recipe"] == "fp8_current")
    settings = Settings(**run["settings"])
    ids = torch.zeros(settings.micro, settings.sequence, dtype=torch.int64, device="meta")
    options = {"recipe": "fp8_current", "optimizer": "adamw_masters", "main_grads": True}
    found = opfuse.memory(language_model(settings, "meta"), input_ids=ids, labels=ids, **options)
    assert found.peak / GIB == pytest.approx(run["figures"]["peak GiB"], rel=0.01)


# -- the commands -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers", reason="of the extra `test`")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return tmp_path / "config.json"


def test_the_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = config.parent / "page.html"
    options = ["--sequence", "256", "--recipe", "fp8_current", "--world", "8", "--checkpointing", "layers", "--budget", "12MiB"]
    assert main(["memory", str(config), *options, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    for told in ("model.layers.* ×2", "each of 8 GPUs", "peak of the first two steps", "budget", "exceeded by"):
        assert told in text
    ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>"))
    assert main(["memory", str(config), "--sequence", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["recipe"] == "none"
    assert sum(found["at_peak"].values()) == found["peak"]
    policy = config.parent / "policy.yaml"
    policy.write_text('version: 1\nrecipe: {kind: fp8_current}\npolicy: {"*.down_proj": {kind: none}}\n')
    assert main(["memory", str(config), "--sequence", "256", "--policy", str(policy), "--json"]) == 0
    assert found["saved"] > json.loads(capsys.readouterr().out)["saved"]
    assert main(["memory", str(config), "--policy", str(policy), "--keep", "all"]) == 1
    assert "wants a recipe in the file alone" in capsys.readouterr().err
    assert main(["memory", str(config), "--recipe", "fp8"]) == 1
    assert "wants a kind of recipe" in capsys.readouterr().err


def test_advice_for_a_budget(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(config), "--rows", "256", "--budget", "10GiB"]) == 0
    text = capsys.readouterr().out
    assert "expected of these products" in text
    assert "fits" in text
    assert main(["advise", str(config), "--rows", "256", "--budget", "20MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["proposals"]
    assert main(["advise", "quickstart", "--budget", "10GiB"]) == 1
    assert "wants a model with a loss" in capsys.readouterr().err


def test_a_curve_has_both_ends_of_each_span() -> None:
    assert curve([(5, 0, 1), (2, 1, 3)], 3) == [5, 7, 2, 2]


def test_an_estimate_leaves_torchs_dispatcher_as_it_was() -> None:
    def registered() -> list[bool]:
        names = ("aten::rms_norm", "aten::scaled_dot_product_attention")
        return [torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradMeta") for name in names]

    with torch.device("meta"):
        model, x = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), torch.empty(32, 64)
    before = registered()
    assert opfuse.memory(model, x).peak == opfuse.memory(model, x).peak > 0
    assert registered() == before == [False, False]
