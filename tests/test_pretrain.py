"""Pre-training as benchmarks/pretrain.py does it, of a tiny model on a CPU: a run goes on with the same bits, on its own text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opfuse
from benchmarks import corpus, pretrain
from benchmarks.pretrain import Data, Settings
from docs import performance, pretraining
from opfuse.errors import ConfigError, OutputError, TrainingError

pytest.importorskip("transformers", reason="of the extra `test`")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
pytestmark = pytest.mark.cpu

WORDS, LENGTH = 512, 32
TINY = Settings(
    tokens=6 * 4 * LENGTH,
    step_tokens=4 * LENGTH,
    sequence=LENGTH,
    micro=2,
    layers=1,
    hidden=64,
    inner=128,
    heads=4,
    groups=2,
    vocabulary=WORDS,
    rate=1e-2,
    validation_tokens=4 * LENGTH,
    every=2,
    compile=False,
)


def marked(number: int) -> str:
    """A file that no other has a line of."""
    return "".join(f"def name_{number}_{line}(x):\n    return x + {number * line}\n" for line in range(12))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of text, with files that are no part of a corpus."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(300):
        (folder / f"part_{number % 3}").mkdir(exist_ok=True)
        (folder / f"part_{number % 3}" / f"file_{number}.py").write_text(marked(number))
    (folder / "copy.md").write_text(marked(7))
    (folder / "large.txt").write_text("x" * (corpus.LARGEST + 1))
    (folder / "latin.rst").write_bytes(b"caf\xe9")
    (folder / "empty.h").write_text(" \n")
    (folder / "image.png").write_text(marked(1000))
    return folder


@pytest.fixture(scope="module")
def found(place: Path, tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    corpus.write(folder := tmp_path_factory.mktemp("data"), [place], WORDS)
    return corpus.corpus(folder)


def losses(run: pretrain.Run) -> tuple[list[float], list[float]]:
    return run.curve["loss"], run.validation["loss"]


def test_a_file_counts_once_in_an_order_of_its_content(place: Path) -> None:
    documents = corpus.documents([place, place / "part_0"])
    assert {each.text for each in documents} == {marked(number) for number in range(300)}
    assert [each.digest for each in documents] == sorted(each.digest for each in documents)
    assert len(documents) == 300


def test_what_is_held_out_is_never_trained_on(place: Path, found: corpus.Corpus) -> None:
    """Of all windows of all epochs; every file is in one of both parts, as its tokens say."""
    documents = corpus.documents([place])
    tokenizer = corpus.trained(corpus.first((each.text for each in documents if not each.held_out), corpus.SAMPLE), WORDS)
    between, parts = WORDS - 1, (found.train, found.held_out)
    texts = [
        {tokenizer.decode(each[each != between].tolist()) for each in np.split(part, np.flatnonzero(part == between))}
        for part in parts
    ]
    for part, held_out in zip(texts, (False, True)):
        assert part - {""} == {each.text for each in documents if each.held_out == held_out}
    data = Data(found, TINY)
    steps = 2 * data.windows * LENGTH // TINY.step_tokens
    seen = torch.cat([data.of_step(step) for step in range(steps)])
    whole = torch.from_numpy(found.train[: data.windows * LENGTH].astype(np.int64)).view(-1, LENGTH)
    assert {*map(tuple, seen.tolist())} == {*map(tuple, whole.tolist())}
    assert not {*map(tuple, seen.tolist())} & {*map(tuple, data.held_out().tolist())}


def test_tokens_are_made_once_and_say_what_they_are_of(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "places", lambda: [place])
    first = corpus.corpus(tmp_path / "data")
    monkeypatch.setattr(corpus, "places", lambda: [tmp_path])
    assert corpus.corpus(tmp_path / "data").about == first.about
    assert first.about["words"] == corpus.WORDS
    parts = [first.about[part] for part in corpus.PARTS]
    assert sum(part["files"] for part in parts) == 300
    for tokens, part in zip((first.train, first.held_out), parts):
        assert len(tokens) == part["tokens"]
        assert first.lengths[tokens].sum() == part["bytes"]
    with pytest.raises(ConfigError, match="name folders with more files"):
        corpus.write(tmp_path / "none", [place / "nothing"])


def test_a_part_of_the_text_is_the_first_of_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = sum(len(each.text) for each in corpus.documents([place]))
    corpus.main(["--data", str(tmp_path), "--roots", str(place), "--megabytes", str(whole / 2e6)])
    parts = [corpus.corpus(tmp_path).about[part] for part in corpus.PARTS]
    assert 0 <= sum(part["bytes"] for part in parts) - whole / 2 < 1000
    assert "train: " in capsys.readouterr().out


def test_windows_come_again_in_another_order() -> None:
    epochs = [pretrain.windows_of(10, 3, 10 * epoch, 10) for epoch in range(3)]
    assert all(sorted(each) == [*range(10)] for each in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert pretrain.windows_of(10, 3, 7, 16) == [*epochs[0][7:], *epochs[1], *epochs[2][:3]]
    assert pretrain.windows_of(10, 4, 0, 10) != epochs[0]


@pytest.mark.parametrize(("recipe", "of_head"), [("delayed", "Float8CurrentScaling"), ("fp8_block", "Float8BlockScaling")])
def test_a_quantized_loss_has_a_recipe_that_its_head_takes(recipe: str, of_head: str) -> None:
    model = pretrain.model_of(replace(TINY, recipe=recipe, loss="quantized", compile=False), "cpu")
    assert opfuse.report(model)[""].recipe == of_head
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.isfinite().all()


def test_a_run_saves_what_its_recipe_keeps() -> None:
    ids = torch.arange(LENGTH).view(1, LENGTH)
    saved = {}
    for keep in ("default", "quantized"):
        model = pretrain.model_of(replace(TINY, recipe="fp8_current", keep=keep, compile=False), "cpu")
        saved[keep] = sum(value.bytes for value in opfuse.saved(model, input_ids=ids).values if value.name == "x")
    assert saved["quantized"] < saved["default"]


@pytest.fixture
def _eager() -> Iterator[None]:
    """torchao compiles its step, which takes long."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(
    "others",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"recipe": "fp8_current"}, marks=pytest.mark.slow),
        pytest.param({"recipe": "delayed"}, marks=pytest.mark.slow),
        pytest.param({"recipe": "fp8_block", "optimizer": "adamw8bit"}, marks=pytest.mark.slow),
        {"recipe": "delayed", "optimizer": "adamw8bit", "micro": 4},
    ],
    ids=lambda others: "_".join(map(str, others.values())) or "bf16",
)
def test_a_run_that_stopped_goes_on_with_the_same_bits(others: dict[str, Any], found: corpus.Corpus, tmp_path: Path) -> None:
    settings = replace(TINY, **others)
    data = Data(found, settings)
    whole = pretrain.pretrain(settings, data, tmp_path / "whole", device="cpu")
    kept = {"device": "cpu", "checkpoint": tmp_path / "kept", "resume": True}
    first = pretrain.pretrain(settings, data, tmp_path / "parts", steps=3, **kept)
    assert (first.step, first.record()["finished"]) == (3, False)
    torch.rand(7)
    second = pretrain.pretrain(settings, data, tmp_path / "parts", **kept)
    assert (second.first, second.step, second.record()["finished"]) == (3, 6, True)
    assert losses(second) == losses(whole)
    for one, other in zip((second.update.updated, second.weights), (whole.update.updated, whole.weights)):
        assert all(map(torch.equal, one.values(), other.values()))
    assert losses(whole)[0][-1] < losses(whole)[0][0]
    assert pretrain.ended(settings, tmp_path / "parts")
    assert not [*(tmp_path / "kept").iterdir()]


def test_a_checkpoint_of_another_run_is_refused(found: corpus.Corpus, tmp_path: Path) -> None:
    data = Data(found, TINY)
    pretrain.Run(TINY, data, "cpu").save(tmp_path / "kept.pt")
    with pytest.raises(OutputError, match="settings"):
        pretrain.Run(replace(TINY, rate=1.0), data, "cpu").load(tmp_path / "kept.pt")
    other = Data(replace(found, about={**found.about, "train": {**found.about["train"], "sha256": ""}}), TINY)
    with pytest.raises(OutputError, match="corpus"):
        pretrain.Run(TINY, other, "cpu").load(tmp_path / "kept.pt")


def test_runs_of_two_recipes_begin_with_the_same_weights_and_windows(found: corpus.Corpus) -> None:
    runs = [pretrain.Run(settings, Data(found, settings), "cpu") for settings in (TINY, replace(TINY, recipe="fp8_current"))]
    assert all(map(torch.equal, runs[0].weights.values(), runs[1].weights.values()))
    assert torch.equal(*(run.data.of_step(1) for run in runs))
    other = replace(TINY, seed=1)
    assert not torch.equal(runs[0].data.of_step(1), Data(found, other).of_step(1))


def test_gradients_of_micro_batches_are_those_of_the_step(found: corpus.Corpus) -> None:
    """In fp32 masters of bf16 weights, up to the rounding of bf16."""
    runs = [pretrain.Run(each, Data(found, each), "cpu") for each in (TINY, replace(TINY, micro=4))]
    for run in runs:
        run.train()
    assert {master.dtype for master in runs[0].update.updated.values()} == {torch.float32}
    one, other = (torch.tensor(run.curve["norm"]) for run in runs)
    assert torch.allclose(one, other, rtol=0.02)
    for run in runs:
        assert all(torch.equal(weight, run.update.updated[name].bfloat16()) for name, weight in run.weights.items())


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_moments_in_8_bits_are_all_that_is_held_beside_weights_and_gradients(recipe: str, found: corpus.Corpus) -> None:
    """Gradients are in bf16 if a step is one micro-batch; over two they are summed in fp32, with the same norm up to rounding."""
    eight = replace(TINY, recipe=recipe, optimizer="adamw8bit")
    masters, whole, halves = (replace(TINY, recipe=recipe, micro=4), replace(eight, micro=4), eight)
    runs = [pretrain.Run(each, Data(found, each), "cpu") for each in (masters, whole, halves)]
    for run, dtype in zip(runs[1:], (torch.bfloat16, torch.float32)):
        run.passes([run.data.of_step(0)[:2]])
        assert {weight.grad.dtype for weight in run.weights.values()} == {dtype}
        assert run.update.updated is run.weights
        run.update.optimizer.zero_grad()
    for run in runs:
        run.train()
    one, *others = (torch.tensor(run.curve["norm"]) for run in runs)
    assert all(torch.allclose(one, other, rtol=0.02) for other in others)
    for run in runs[1:]:
        assert all(weight.grad is None for weight in run.weights.values())
        states = [state for weight, state in run.update.optimizer.state.items() if weight.numel() >= 4096]
        assert len(states) == sum(weight.numel() >= 4096 for weight in run.weights.values())
        assert {state[name].codes.element_size() for state in states for name in ("exp_avg", "exp_avg_sq")} == {1}


@pytest.mark.usefixtures("_eager")
def test_moments_in_8_bits_train_as_fp32_masters_do(found: corpus.Corpus, tmp_path: Path) -> None:
    """As far as 20 steps of a tiny model tell."""
    long = replace(TINY, recipe="fp8_current", tokens=20 * TINY.step_tokens, micro=4, every=20)
    made = [
        pretrain.pretrain(each, Data(found, each), tmp_path, device="cpu")
        for each in (long, replace(long, optimizer="adamw8bit"))
    ]
    one, other = (run.record()["figures"]["validation loss"] for run in made)
    assert other < 1.05 * one
    assert one < 0.8 * made[0].curve["loss"][0]


@pytest.mark.usefixtures("_eager")
def test_the_vocabulary_of_llama_3_trains_without_logits_on_fewer_words(found: corpus.Corpus) -> None:
    few = {"tokens": 2 * LENGTH, "step_tokens": LENGTH, "micro": 1, "hidden": 32}
    settings = replace(TINY, **few, vocabulary=128_256, loss="fused", recipe="fp8_block")
    run = pretrain.Run(settings, Data(found, settings), "cpu")
    for _ in range(2):
        run.train()
    assert run.curve["loss"][1] < run.curve["loss"][0]
    assert settings.name.endswith(
        "micro-1_layers-1_hidden-32_inner-128_heads-4_groups-2_vocabulary-128256_loss-fused"
        "_rate-0.01_validation_tokens-128_every-2_compile-False"
    )


def test_a_loss_that_is_no_number_ends_the_run(found: corpus.Corpus, tmp_path: Path) -> None:
    settings = replace(TINY, rate=1e30, clip=1e30)
    with pytest.raises(TrainingError, match="choose a lower rate"):
        pretrain.pretrain(settings, Data(found, settings), tmp_path, device="cpu")
    assert (tmp_path / f"{settings.name}.json").exists()


def test_sizes_that_do_not_fit_are_refused(found: corpus.Corpus) -> None:
    with pytest.raises(ConfigError, match="step_tokens"):
        replace(TINY, step_tokens=3 * LENGTH)
    for settings in (replace(TINY, vocabulary=WORDS - 1), replace(TINY, validation_tokens=2**20)):
        with pytest.raises(ConfigError, match="held out"):
            Data(found, settings)


def test_the_rate_rises_and_falls() -> None:
    rates = [TINY.rate_of(step) for step in range(TINY.steps + 1)]
    assert rates[0] == TINY.rate
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(TINY.rate * TINY.floor)
    slow = replace(TINY, warm_up=0.5)
    assert [slow.rate_of(step) for step in range(3)] == pytest.approx([slow.rate / 3, 2 * slow.rate / 3, slow.rate])


def test_runs_are_merged_into_one_file(found: corpus.Corpus, tmp_path: Path) -> None:
    for recipe in ("fp8_current", "bf16"):
        settings = replace(TINY, recipe=recipe)
        pretrain.pretrain(settings, Data(found, settings), tmp_path, device="cpu")
    files = sorted(tmp_path.glob("*.json"))
    run = json.loads(files[0].read_text())
    assert {"settings", "versions", "date", "package_digest", "corpus", "shares", "products", "epochs"} <= run.keys()
    assert {"device", "torch", "opfuse", "transformers", "tokenizers"} <= run["versions"].keys()
    assert run["curve"].keys() == {*pretrain.COLUMNS}
    assert run["validation"].keys() == {*pretrain.CHECKED}
    assert {len(values) for values in run["curve"].values()} == {6}
    assert run["validation"]["step"] == [2, 4, 6]
    assert sum(run["shares"].values()) == pytest.approx(1)
    assert run["figures"]["training loss"] == run["curve"]["loss"][-1]
    assert run["figures"]["tokens"] == 6 * TINY.step_tokens
    for file in (*files, files[0]):
        pretrain.main(["--table", str(file), "--file", str(tmp_path / "results.json")])
    made = json.loads((tmp_path / "results.json").read_text())
    assert made.keys() == {"script", "versions", "corpus", "runs"}
    assert [each["settings"]["recipe"] for each in made["runs"]] == ["bf16", "fp8_current"]
    with pytest.raises(ConfigError, match="different names"):
        pretrain.merged([run, run])
    with pytest.raises(ConfigError, match="one machine"):
        pretrain.merged([run, {**run, "name": "other", "versions": {}}])


def test_a_curve_of_a_file_has_its_ends() -> None:
    curve = {"step": [*range(1, 1001)], "loss": [1 / step for step in range(1, 1001)]}
    thin = pretrain.thinned(curve)
    assert len(thin["step"]) == len(thin["loss"]) == pretrain.POINTS
    assert (thin["step"][0], thin["step"][-1]) == (1, 1000)
    assert pretrain.thinned({"step": [1, 2]}) == {"step": [1, 2]}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_the_loss_may_be_without_logits(recipe: str, found: corpus.Corpus) -> None:
    """In bf16 too, around layers that compute what they did."""
    losses = []
    for loss in ("plain", "fused", "quantized"):
        settings = replace(TINY, recipe=recipe, loss=loss)
        run = pretrain.Run(settings, Data(found, settings), "cpu")
        run.train()
        run.validate()
        losses.append(torch.tensor([*run.curve["loss"], *run.validation["loss"]]))
    assert all(torch.allclose(losses[0], each, rtol=5e-3) for each in losses[1:])


def test_the_command_trains(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.write(tmp_path / "data", [place], WORDS)
    sizes = {"tokens": 2 * LENGTH, "step-tokens": LENGTH, "sequence": LENGTH, "validation-tokens": LENGTH, "micro": 1}
    sizes |= {"layers": 1, "hidden": 32, "inner": 64, "heads": 2, "groups": 1, "vocabulary": WORDS}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    places = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "kept")]
    own = [*flags, *places, "--device", "cpu", "--no-compile", "--resume"]
    pretrain.main([*own, "--minutes", "0"])
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".pt"]
    pretrain.main(own)
    (file,) = (tmp_path / "out").glob("*.json")
    assert json.loads(file.read_text())["finished"]
    assert "M tokens, sha256" in capsys.readouterr().out
    pretrain.main(own)
    assert capsys.readouterr().out.endswith("has ended\n")
    with pytest.raises(SystemExit):
        pretrain.arguments(["--resume"])


def of(recipe: str, seed: int, nats: float, speed: float, **others: object) -> pretrain.Record:
    """A file of a run that has been."""
    settings = Settings(recipe=recipe, seed=seed, **others)
    tokens = [settings.tokens // 2, settings.tokens]
    moment = {"date": "2026-01-02", "kernels_digest": "a" * 64, "package_digest": "b" * 64}
    part = {"files": 1234, "bytes": 5_000_000, "tokens": 1_600_000, "sha256": "c" * 64}
    figures = {"training loss": nats - 0.1, "validation loss": nats, "bits per byte": nats / 3, "tokens per second": speed}
    return {
        "name": settings.name,
        "settings": asdict(settings),
        **moment,
        "versions": {"device": "NVIDIA H200", "torch": "2.11"},
        "products": "emulated" if recipe == "mxfp8" else "native",
        "corpus": {"words": 32_768, "train": part, "held_out": part},
        "parameters": 1_100_000_000,
        "finished": True,
        "epochs": 0.25,
        "figures": {**figures, "tokens": settings.tokens, "peak GiB": 80.0 if recipe == "bf16" else 70.0},
        "curve": {"step": [1, 2], "loss": [9.0, nats]},
        "validation": {"step": [1, 2], "tokens": tokens, "loss": [nats + 1, nats], "bits": [3.0, nats / 3]},
    }


def test_the_page_compares_recipes_with_bf16_of_the_same_seed_and_setup() -> None:
    runs = [
        of("bf16", 0, 2.0, 50_000),
        of("bf16", 1, 2.02, 60_000),
        of("fp8_block", 0, 2.01, 66_000),
        of("mxfp8", 1, 2.02, 11_000),
    ]
    runs += [of("fp8_block", 0, 5.0, 99_000, vocabulary=128_256, tokens=131_072), of("fp8_block", 0, 5.0, 99_000, loss="fused")]
    made = pretrain.merged(runs)
    page = performance.trained(made, "aaa")
    text = " ".join(page.split())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| 1.10")]
    found = {tuple(row[1:4]): row for row in rows}
    assert len(found) == len(runs)
    plain = "32 768, plain, 32 768"
    assert found[plain, "bf16", "0"][-4:] == ["0.667", "50 000", "0.91", "80.0, 100 % of bf16"]
    assert found[plain, "fp8_block", "0"][-4:] == ["0.670", "66 000", "1.20", "70.0, 88 % of bf16"]
    assert found[plain, "mxfp8 (emulated)", "1"][4:8] == ["20.0", "0.25", "1.920", "2.020"]
    assert found["32 768, fused, 32 768", "fp8_block", "0"][-2:] == ["", "70.0"]
    assert "| M tokens | bf16 | fp8_block | mxfp8 (emulated) |" in page
    assert "| 20.0 | 2.000 / 2.020 | 2.010 | 2.020 |" in page
    assert "same seed: fp8_block +0.50 %; mxfp8 (emulated) +0.00 %. Between seeds bf16 itself differs by 1.00 %." in text
    assert "reads 0.018 tokens for each parameter" in text
    assert "On 2026-01-02: kernels aaaaaaaaaaaa, of these sources" in text
    assert "1 234 files without copies" in text


def test_the_page_tells_of_runs_that_have_not_ended() -> None:
    run = {**of("fp8_block", 0, 2.0, 1.0), "finished": False}
    run["figures"] = {**dict.fromkeys(run["figures"]), "tokens": 131_072, "peak GiB": 0.0}
    page = pretraining.section(pretrain.merged([run]))
    assert "| fp8_block | 0 | 0.1 of 20.0 |" in page
    assert "Validation loss" not in page


def test_there_is_a_section_if_there_are_results() -> None:
    records = [json.loads(file.read_text(encoding="utf-8")) for file in (performance.RECORD, performance.RANKS, performance.H100)]
    heading = f"\n## {pretraining.HEADING}\n"
    assert heading not in performance.document(*records, "")
    assert heading in performance.document(*records, "", runs=pretrain.merged([of("bf16", 0, 2.0, 1.0)]))
