"""The scripts in examples/ do what they say. Each trains a tiny model of the real class for a few steps."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import opfuse
from opfuse.errors import ConversionError
from tests.processes import run_ranks
from tests.turns import in_turn

transformers = pytest.importorskip("transformers", reason="of the extra `test`")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def script(name: str):
    return importlib.import_module(f"examples.{name}")


def test_own_loop():
    losses = script("own_loop").main(steps=5)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_trainer_saves_what_transformers_alone_reads(tmp_path):
    trainer, stock = script("hf_trainer").main(str(tmp_path), steps=4)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert float(losses[-1]) < float(losses[0])
    assert not any("forward" in vars(module) for module in stock.modules())
    words = torch.arange(16)[None]
    trained = opfuse.unfuse_(trainer.model).eval()
    assert torch.equal(stock.eval()(words).logits, trained(words).logits)


def test_trainer_hands_a_converted_model_the_columns_that_its_forward_names(tmp_path):
    """It reads the signature, and drops every other column of a data set, of which the collator here could make no tensor."""

    class Regression(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            return (model(inputs["input"]) - inputs["labels"]).square().mean()

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling())
    rows = [{"input": torch.randn(16), "labels": torch.randn(16), "source": object()} for _ in range(8)]
    settings = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), label_names=["labels"], **settings)
    assert Regression(model, arguments, train_dataset=rows).train().global_step == 2


def test_lora_trains_adapters_alone_and_peft_reads_them(tmp_path):
    pytest.importorskip("peft", reason="of no extra: `pip install peft`")
    losses, model, stock = script("lora").main(str(tmp_path), steps=4)
    assert losses[-1] < losses[0]
    words = torch.arange(16)[None]
    with torch.no_grad(), opfuse.autocast(enabled=False):
        assert torch.equal(stock.eval()(words).logits, model.eval()(words).logits)
    begun = script("lora").pretrained().state_dict()
    ended = {name: each for name, each in model.state_dict().items() if "lora_" not in name}
    frozen = {name.removeprefix("base_model.model.").replace(".base_layer", ""): each for name, each in ended.items()}
    assert frozen.keys() == begun.keys()
    assert all(torch.equal(each, begun[name]) for name, each in frozen.items())


def test_accelerate():
    state = pytest.importorskip("accelerate.state", reason="of the extra `test`")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # of the Trainer before
    losses = script("accelerate_loop").main(steps=4)
    assert losses[-1] < losses[0]
    module, x = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()), torch.randn(8, 32)
    opfuse.fuse_(module, opfuse.recipes.Float8CurrentScaling())  # whose forward is the very one that Accelerate wraps
    with torch.autocast("cpu", torch.bfloat16):
        wanted = module(x).float()
    accelerator = importlib.import_module("accelerate").Accelerator()
    prepared = accelerator.prepare(module)
    assert torch.equal(prepared(x), wanted)
    with pytest.raises(ConversionError, match="unwrap_model"):
        opfuse.unfuse_(module)
    assert opfuse.unfuse_(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)) is module
    assert "forward" not in vars(module)


def test_accelerate_by_a_handler():
    state = pytest.importorskip("accelerate.state", reason="of the extra `test`")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    losses, model = script("accelerate_fp8").main(steps=8)
    assert losses[-1] < 0.9 * losses[0]
    told = {each.path: each.status for each in opfuse.report(model)}
    assert told["model.layers.0.mlp.up_proj"] == "kept"
    assert told["model.layers.1.mlp"] == "fused"


@pytest.mark.slow  # the import takes five seconds
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    pytest.importorskip("pytorch_lightning", reason="of the extra `test`")
    losses = script("lightning_module").main(str(tmp_path))
    assert losses[-1] < losses[0]


def test_torchtitan_converts_on_the_meta_device(capsys):
    losses = script("torchtitan_converter").main()
    assert losses[-1] < 0.8 * losses[0]
    told = capsys.readouterr().out
    assert "Linear×2 → SwiGLU → Linear" in told
    assert "layers.0.feed_forward" in told
    assert "your policy leaves it alone ('layers.0': None)" in told


@pytest.mark.row("X16")
@pytest.mark.parametrize(("mixture", "updates"), in_turn([False, True], [2, 6], of=4))
def test_the_policy_that_acts_is_the_one_that_learns(mixture, updates):
    """After its first update, too; what it learns shows after six."""
    rewards, differences = script("rl").main(updates=updates, mixture=mixture)
    assert differences == [0.0] * updates
    assert updates < 6 or rewards[-1] > 1.5 * rewards[0]


@pytest.mark.slow
@pytest.mark.row("X16")
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_it_is_after_a_hundred_updates(mixture):
    rewards, differences = script("rl").main(updates=100, mixture=mixture)
    assert differences == [0.0] * 100
    assert max(rewards) > 5 * rewards[0]


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.save(script("fsdp2").main(steps=2), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_of_fsdp2_train_as_one(tmp_path):
    example = script("fsdp2")
    run_ranks(_rank, tmp_path)
    (losses, state), (others, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert losses == others

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**example.SIZES))
    opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for loss in losses:
        parts = []
        for rank in range(2):
            words = torch.arange(32).repeat(4, 1) + torch.arange(4)[:, None] + 4 * rank
            parts.append(model(input_ids=words, labels=words).loss)
            (parts[-1] / 2).backward()
        assert (sum(parts) / 2).item() == loss
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_an_op_of_cuda_text_learns_in_a_pipeline():
    assert script("raw_kernel").main() < 5


def test_every_example_is_named_in_the_readme_and_tried_here():
    readme, tests = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in readme
        assert f'script("{path.stem}")' in tests
