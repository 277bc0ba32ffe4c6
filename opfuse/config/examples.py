"""The configurations that come with the package, which every command takes by name."""

from __future__ import annotations

from pathlib import Path

import opfuse

_PACKAGE = Path(opfuse.__file__).parent

PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
"""Where an installed package has them, and where a checkout has."""


def examples() -> dict[str, Path]:
    """Their files by name: ``quickstart``."""
    place = next((place for place in PLACES if place.is_dir()), None)
    return {} if place is None else {path.stem: path for path in sorted(place.glob("*.yaml"))}
