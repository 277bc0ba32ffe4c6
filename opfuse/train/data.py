"""Text to train on, and samples of it: the same ones for the same seed, on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch

from opfuse.config import Text, TokenFile, UserFile
from opfuse.errors import ConfigError, ShapeError, describe, number_of, os_error_text

BYTES = 256
"""Classes: the next byte is one of these."""


class Batch(NamedTuple):
    """Samples. context: int64 (samples, context), bytes in reading order. target: int64 (samples,), the byte after each."""

    context: torch.Tensor
    target: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """A copy of the samples on ``device``."""
        return Batch(self.context.to(device), self.target.to(device))


def pydoc_topics() -> bytes:
    """The topics of Python's ``help()``, joined in the order of their names: English and code, about 0.46 MB of UTF-8.

    Every CPython carries them; the wording changes between its versions.
    """
    return "".join(topics[name] for name in sorted(topics)).encode()


def read(path: Path) -> bytes:
    """A file as it is. ConfigError if it cannot be read, or holds nothing."""
    try:
        text, got = path.read_bytes(), "an empty one"
    except OSError as error:
        text, got = b"", os_error_text(error)
    if not text:
        cure = "write data.path from the folder of the configuration, or as an absolute path"
        raise ConfigError(describe(f"data {path}", wanted="a file with a text", got=got, cure=cure))
    return text


def text_of(data: Text, folder: Path) -> tuple[str, bytes]:
    """The name and the bytes of what a configuration in ``folder`` trains on."""
    if isinstance(data, UserFile):
        return data.path, read(folder / data.path)
    return data.kind, pydoc_topics()


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, uint8 (length,) each, or int32 of tokens: ``validation`` is the end of it and is never trained on."""

    name: str
    train: torch.Tensor
    validation: torch.Tensor
    sha256: str

    @property
    def unit(self) -> str:
        """What is predicted."""
        return "byte" if self.train.dtype == torch.uint8 else "token"

    @property
    def unigram_entropy(self) -> float:
        """Nats per unit of a model that knows only how frequent each is: entropy of the whole text's frequencies."""
        counts = torch.cat((self.train, self.validation)).bincount().double()
        return float(torch.special.entr(counts / counts.sum()).sum())


def corpus(data: Text, folder: str | Path = ".") -> Corpus:
    """The text that a configuration in ``folder`` names, split. ConfigError if it cannot be read."""
    name, text = text_of(data, Path(folder))
    values = _tokens(name, text, data) if isinstance(data, TokenFile) else torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(values) - round(len(values) * data.validation_fraction)
    return Corpus(name, values[:cut], values[cut:], hashlib.sha256(text).hexdigest())


def _tokens(name: str, data: bytes, file: TokenFile) -> torch.Tensor:
    """The numbers of a file of tokens, int32. ConfigError for half a number, and for one outside the vocabulary."""
    whole = len(data) % 2 == 0
    found = torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(np.int32)) if whole else torch.empty(0, dtype=torch.int32)
    most = int(found.max()) if whole else -1
    if not whole or most >= file.vocabulary:
        wanted = f"16-bit numbers below its vocabulary, {file.vocabulary}"
        got = f"{most}" if whole else number_of(len(data), "byte")
        cure = "write numpy's uint16 with tofile, and data.vocabulary as the tokenizer has it"
        raise ConfigError(describe(f"data {name}", wanted=wanted, got=got, cure=cure))
    return found


def windows(text: torch.Tensor, context: int) -> torch.Tensor:
    """Every stretch of ``context`` bytes and the one that follows, as a view (stretches, context + 1).

    ShapeError if the text holds none.
    """
    if len(text) <= context:
        cure = "choose a shorter context or another validation_fraction"
        raise ShapeError(describe("text to sample", wanted=f"more than {number_of(context, 'byte')}", got=len(text), cure=cure))
    return text.unfold(0, context + 1, 1)


def _batch(stretches: torch.Tensor) -> Batch:
    stretches = stretches.long()
    return Batch(stretches[:, :-1], stretches[:, -1])


def random_batches(text: torch.Tensor, *, context: int, batch_size: int, seed: int, skip: int = 0) -> Iterator[Batch]:
    """Samples drawn uniformly with replacement, without end. skip: batches that are drawn and left out."""
    found = windows(text, context)
    generator = torch.Generator().manual_seed(seed)
    for number in count():
        at = torch.randint(len(found), (batch_size,), generator=generator, device="cpu")
        if number >= skip:
            yield _batch(found[at])


def spread_batches(text: torch.Tensor, *, context: int, batch_size: int, count: int) -> list[Batch]:
    """``count`` batches of samples at equal distances over the text: no seed changes what a model is judged by."""
    found = windows(text, context)
    at = torch.linspace(0, len(found) - 1, count * batch_size, dtype=torch.float64, device="cpu").long()
    return [_batch(found[part]) for part in at.split(batch_size)]
