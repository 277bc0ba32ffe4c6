"""The text is real, whole and the same every time; samples are stretches of it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from opfuse.cli.app import main
from opfuse.config import PydocTopics, load
from opfuse.config.load import check
from opfuse.errors import ConfigError, ShapeError
from opfuse.train.data import Corpus, corpus, pydoc_topics, random_batches, spread_batches


@pytest.fixture(scope="module")
def text() -> Corpus:
    return corpus(PydocTopics(kind="pydoc_topics"))


def test_the_text_is_every_help_topic_in_order() -> None:
    whole = pydoc_topics().decode()
    assert 300_000 < len(whole) < 1_000_000
    at = 0
    for name in sorted(topics):
        assert whole.startswith(topics[name], at)
        at += len(topics[name])
    assert at == len(whole)
    assert "Assert statements are a convenient way to insert debugging assertions" in whole


def test_the_parts_make_up_the_text(text: Corpus) -> None:
    whole = pydoc_topics()
    assert bytes(text.train.tolist() + text.validation.tolist()) == whole
    assert len(text.validation) == round(0.1 * len(whole))


def test_unigram_entropy_is_that_of_the_frequencies(text: Corpus) -> None:
    counts, total = Counter(pydoc_topics()), len(pydoc_topics())
    expected = -math.fsum(n / total * math.log(n / total) for n in counts.values())
    assert text.unigram_entropy == pytest.approx(expected, rel=1e-12)
    assert 3.0 < expected < 3.5


def test_samples_are_stretches_of_the_training_text(text: Corpus) -> None:
    inside = bytes(text.train.tolist())
    batch = next(random_batches(text.train, context=12, batch_size=64, seed=3))
    assert (batch.context.shape, batch.target.shape) == ((64, 12), (64,))
    assert (batch.context.dtype, batch.target.dtype) == (torch.int64, torch.int64)
    for context, target in zip(batch.context.tolist(), batch.target.tolist()):
        assert bytes([*context, target]) in inside


def test_samples_follow_the_seed(text: Corpus) -> None:
    def first(seed: int) -> torch.Tensor:
        batches = islice(random_batches(text.train, context=8, batch_size=16, seed=seed), 3)
        return torch.cat([batch.context for batch in batches])

    assert torch.equal(first(5), first(5))
    assert not torch.equal(first(5), first(6))
    assert len(first(5).unique(dim=0)) > 40


def test_evaluation_spans_the_validation_text(text: Corpus) -> None:
    batches = spread_batches(text.validation, context=8, batch_size=32, count=4)
    assert [len(batch.target) for batch in batches] == [32] * 4
    assert batches[0].context[0].tolist() == text.validation[:8].tolist()
    assert [*batches[-1].context[-1].tolist(), int(batches[-1].target[-1])] == text.validation[-9:].tolist()


def test_a_text_shorter_than_the_context_is_refused(text: Corpus) -> None:
    with pytest.raises(ShapeError, match="wants more than 8 bytes, got 8"):
        spread_batches(text.validation[:8], context=8, batch_size=4, count=1)


FILE = """\
version: 1
recipe: {kind: none}
pipeline: {dtype: float32, ops: [{op: linear, in_features: 8, out_features: 256}]}
data: {kind: text, path: texts/own.txt, context: 2, embedding: 4, validation_fraction: 0.25}
"""


def test_a_file_of_ones_own_lies_beside_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(FILE)
    (finding,) = check(path)
    assert (finding.code, finding.span.line, finding.span.column) == ("no-file", 4, 26)
    config = load(path)
    assert config.data is not None
    with pytest.raises(ConfigError, match=r"texts.own\.txt: wants a file with a text, got FileNotFoundError"):
        corpus(config.data, config.folder)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "own.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="got an empty one"):
        corpus(config.data, config.folder)
    (tmp_path / "texts" / "own.txt").write_bytes(bytes(range(200)))
    assert check(path) == ()
    found = corpus(config.data, config.folder)
    assert (found.name, found.train.tolist(), found.validation.tolist()) == (
        "texts/own.txt",
        [*range(150)],
        [*range(150, 200)],
    )


def test_a_text_that_nothing_knows_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(FILE.replace("kind: text", "kind: txt"))
    (finding,) = check(path)
    assert str(finding).startswith(f"{path}:4:14: error[unknown-text]: there is no text 'txt'")
    assert finding.help == "did you mean 'text'?"


def test_a_file_of_tokens_stands_in_for_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As nanoGPT writes them; numbers that the vocabulary has not are refused, as is half of one."""
    path, tokens = tmp_path / "own.yaml", tmp_path / "train.bin"
    numbers = torch.arange(1200).mul(7).remainder(300)
    numbers.numpy().astype("<u2").tofile(tokens)
    lines = "recipe: {kind: none}\npipeline: {dtype: float32, ops: [{op: linear, in_features: 8, out_features: 300}]}\n"
    data = "data: {kind: tokens, path: train.bin, vocabulary: 300, context: 2, embedding: 4}\n"
    path.write_text(f"version: 1\n{lines}{data}train: {{steps: 2, batch_size: 8}}\n")
    assert check(path) == ()
    config = load(path)
    assert config.data is not None
    found = corpus(config.data, config.folder)
    assert torch.equal(torch.cat((found.train, found.validation)).long(), numbers)
    assert found.unit == "token"
    assert main(["run", str(path), "--out", str(tmp_path / "run")]) == 0
    assert "nats per token" in capsys.readouterr().out
    path.write_text(path.read_text().replace("vocabulary: 300", "vocabulary: 299"))
    assert [finding.code for finding in check(path)] == ["does-not-fit"]
    for wrong in (tokens.read_bytes()[:-1], (300).to_bytes(2, "little")):
        tokens.write_bytes(wrong)
        with pytest.raises(
            ConfigError, match=r"data train\.bin: wants 16-bit numbers below its vocabulary, 300, got (300|2399 bytes)"
        ):
            corpus(config.data, config.folder)
