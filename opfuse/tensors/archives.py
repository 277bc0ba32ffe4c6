"""Files of ``torch.save``, read so that damage to them is an error and never another value."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

_MAGIC = b"PK"


def unarchived(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``, on the CPU. OSError if it cannot be read; any other exception if it is damaged.

    torch.load ignores the CRC-32 that each part of its archive has, so a bit that changed on the disk would be another value.
    Files of torch before 1.6 are no archives and have no checksum: what is damaged in them may go unseen.
    """
    with path.open("rb") as file:
        if zipfile.is_zipfile(file) or _begins(file):
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"damaged data: the CRC-32 of {damaged} is not what was saved")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _begins(file: Any) -> bool:
    """Whether ``file`` begins as an archive, whose end is damaged then."""
    file.seek(0)
    return bool(file.read(len(_MAGIC)) == _MAGIC)
