"""Records that processes write and read again: for their owner alone, and with a checksum, by which damage is noticed."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from typing import Any

OWNER_ONLY = 0o600
"""The mode of files: what they tell of a machine and of its data is no one else's."""

_CHECKSUM = "crc32"
_DEPTH, _DEEP = 50, "values nested too deeply"
"""Records have less than ten levels. With many, who compares or prints one might reach Python's own limit."""


def owner_only(path: str, flags: int) -> int:
    """An opener of :func:`open` that leaves the file to its owner."""
    handle = os.open(path, flags, OWNER_ONLY)
    state = os.fstat(handle)
    if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
        os.fchmod(handle, OWNER_ONLY)  # it may have been there before
    return handle


def sealed(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """A record as JSON, with the CRC-32 of what it says. ValueError for numbers that are not finite."""
    return json.dumps({**record, _CHECKSUM: _checksum(record)}, indent=indent, allow_nan=False)


def unsealed(text: str) -> Any:
    """What a text of :func:`sealed` says. ValueError if it is no JSON, is nested too deeply, or does not say what was written.

    A record without a checksum is one that a person or an earlier version wrote.
    """
    try:
        record = json.loads(text)
        _check_depth(record)
    except RecursionError:
        raise ValueError(_DEEP) from None
    checksum = record.pop(_CHECKSUM, None) if isinstance(record, dict) else None
    if checksum is not None and checksum != _checksum(record):
        raise ValueError("damaged data: the CRC-32 is not that of what was written")
    return record


def _check_depth(record: Any) -> None:
    """ValueError for lists and objects within each other beyond :data:`_DEPTH`."""
    level = [record]
    for _ in range(_DEPTH):
        branches = [
            branch.values() if isinstance(branch, dict) else branch for branch in level if isinstance(branch, (dict, list))
        ]
        level = [inner for branch in branches for inner in branch]
    if level:
        raise ValueError(_DEEP)


def _checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"
