"""Text that a machine has, as tokens: ``python -m benchmarks.corpus --data DIR [--megabytes N] [--roots FOLDER …]``.

It is sources and pages below the folders that Python imports from, all of them or the first N MB.

Each file counts once, whatever copies there are. A hash of its content gives its place in the order, and says whether it is held
out, so that two machines with the same files have the same tokens. The tokenizer is a byte-level BPE, trained on the part that is
not held out, which gives each byte sequence one sequence of tokens. Between two files stands the last number of the vocabulary.

A folder keeps ``tokenizer.json``, ``train.bin`` and ``held_out.bin`` (16-bit numbers), and ``corpus.json``, which is written
last: it says what they were made of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from opfuse.errors import ConfigError, describe

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".cuh", ".hpp")
LARGEST = 2**20
"""Bytes of a file, at most: larger ones are mostly tables that a program wrote."""

WORDS = 32_768
HELD_OUT = 64
"""Of so many files one is held out."""

SAMPLE = 64 * 2**20
"""Bytes that the tokenizer is trained on, at most."""

TOGETHER = 2048
"""Texts that are encoded at once."""

ABOUT, TOKENIZER, PARTS = "corpus.json", "tokenizer.json", ("train", "held_out")


class Document(NamedTuple):
    """The content of a file. digest: SHA-256 of its bytes."""

    digest: str
    text: str

    @property
    def held_out(self) -> bool:
        """By the last digits of the digest, whose first ones give the order."""
        return int(self.digest[-8:], 16) % HELD_OUT == 0


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens that are held out, uint16. lengths: bytes of each word, int64. about: what it was made of."""

    train: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]
    lengths: npt.NDArray[np.int64]
    about: dict[str, Any]


def places() -> list[Path]:
    """The folders that Python imports from, without this repository."""
    folders = [Path(path).resolve() for path in (sysconfig.get_path("stdlib"), *sys.path) if path]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir() and folder not in (ROOT, Path.cwd())]


def paths(folders: Iterable[Path]) -> Iterator[Path]:
    """Files of text below ``folders``, each once."""
    seen = set()
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                path = Path(place, name)
                if name.endswith(SUFFIXES) and path not in seen:
                    seen.add(path)
                    yield path


def documents(folders: Iterable[Path]) -> list[Document]:
    """What is below ``folders``, without copies, in the order of digests. Files that are no UTF-8, or too large, are left out."""
    found: dict[str, Document] = {}
    for path in paths(folders):
        try:
            content = path.read_bytes() if path.stat().st_size <= LARGEST else b""
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            digest = hashlib.sha256(content).hexdigest()
            found[digest] = Document(digest, text)
    return [found[digest] for digest in sorted(found)]


def first(texts: Iterable[str], size: float) -> Iterator[str]:
    """The first texts, of ``size`` bytes or a little more."""
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


def trained(texts: Iterable[str], words: int) -> Any:
    """A tokenizer of ``words`` words, the last of which no text becomes: it stands between files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=words - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(texts: Iterable[str], tokenizer: Any, between: int) -> Iterator[npt.NDArray[np.uint16]]:
    """The tokens of each text, and the number that stands behind it."""
    remaining = iter(texts)
    while chunk := [*islice(remaining, TOGETHER)]:
        for each in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            yield np.asarray([*each.ids, between], dtype=np.uint16)


def lengths_of(tokenizer: Any, words: int) -> list[int]:
    """Bytes of each word: a byte-level word has a character for each. What stands between files has none."""
    found = [0] * words
    for word, number in tokenizer.get_vocab().items():
        found[number] = len(word)
    return found


def write(folder: Path, folders: Sequence[Path], words: int = WORDS, most: float = math.inf) -> None:
    """Read ``most`` bytes, train the tokenizer, encode. ConfigError if one of both parts is empty."""
    start = time.perf_counter()
    every = documents(folders)
    every = every[: len([*first((each.text for each in every), most)])]
    parts = dict(zip(PARTS, ([each.text for each in every if each.held_out == held_out] for held_out in (False, True))))
    for name, texts in parts.items():
        if not texts:
            cure = "name folders with more files: about one file of 64 is held out"
            raise ConfigError(describe(f"corpus of {len(every)} files, {name}", wanted="files", got="none", cure=cure))
    read = time.perf_counter()
    tokenizer = trained(first(parts["train"], SAMPLE), words)
    made = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    about: dict[str, Any] = {"words": words}
    for name, texts in parts.items():
        tokens = np.concatenate([*encoded(texts, tokenizer, words - 1)])
        tokens.tofile(folder / f"{name}.bin")
        size, digest = sum(len(text.encode()) for text in texts), hashlib.sha256(tokens.tobytes()).hexdigest()
        about[name] = {"files": len(texts), "bytes": size, "tokens": len(tokens), "sha256": digest}
    seconds = {"reading": read - start, "tokenizer": made - read, "encoding": time.perf_counter() - made}
    about |= {"seconds": {name: round(value, 1) for name, value in seconds.items()}, "lengths": lengths_of(tokenizer, words)}
    (folder / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def corpus(folder: Path) -> Corpus:
    """What ``folder`` keeps, made first of all text of :func:`places` if nothing is there."""
    if not (folder / ABOUT).exists():
        write(folder, places())
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    train, held_out = (np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r") for name in PARTS)
    return Corpus(train, held_out, np.asarray(about.pop("lengths"), dtype=np.int64), about)


def told(about: Mapping[str, Any]) -> Iterator[str]:
    """What text there is."""
    for part in PARTS:
        each = about[part]
        size = f"{each['files']} files, {each['bytes'] / 1e6:.1f} MB, {each['tokens'] / 1e6:.2f} M tokens"
        yield f"{part}: {size}, sha256 {each['sha256'][:12]}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/corpus"), help="the folder to write")
    parser.add_argument("--roots", type=Path, nargs="+", help="folders with text, by default those that Python imports from")
    parser.add_argument("--megabytes", type=float, default=math.inf, help="of text, at most")
    chosen = parser.parse_args(given)
    write(chosen.data, chosen.roots or places(), most=1e6 * chosen.megabytes)
    print(*told(corpus(chosen.data).about), sep="\n")


if __name__ == "__main__":
    main()
