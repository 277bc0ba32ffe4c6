"""Plots as PNG files, where matplotlib is installed: it is an extra of the package."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG with 120 dots per inch."""
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()
