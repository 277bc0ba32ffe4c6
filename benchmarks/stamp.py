"""What a file of figures says of where they come from: date, machine, packages, kernels, script."""

from __future__ import annotations

import datetime
import platform
import re
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

import opfuse
from opfuse.kernels.registry import sources_digest

RESULTS = Path(__file__).parent / "results"


def versions() -> dict[str, str]:
    """Of the machine and of what runs on it. CuPy is a package for each major version of CUDA."""
    cupy = ", ".join(f"{name} {version(name)}" for name in sorted({*packages_distributions().get("cupy", ())}))
    packages = {"opfuse": opfuse.__version__, "torch": torch.__version__, "cupy": cupy}
    return {"device": torch.cuda.get_device_name(), "python": platform.python_version(), **packages}


def stamp(script: str) -> dict[str, Any]:
    """Everything but the results."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "versions": versions(), "kernels_digest": sources_digest(), "script": script}


def device_file() -> Path:
    """The file of this device's figures: ``h200.json`` for an NVIDIA H200."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return RESULTS / f"{re.sub('[^0-9a-z]+', '_', name)}.json"
