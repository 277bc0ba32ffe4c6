"""What a file of figures says of where they come from: date, machine, packages, digests of the code, script."""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

import opfuse
from opfuse.kernels.engine.sources import sources_digest

RESULTS = Path(__file__).parent / "results"


def versions() -> dict[str, str]:
    """Of the machine and of what runs on it. CuPy is a package for each major version of CUDA."""
    cupy = ", ".join(f"{name} {version(name)}" for name in sorted({*packages_distributions().get("cupy", ())}))
    packages = {"opfuse": opfuse.__version__, "torch": torch.__version__, "cupy": cupy}
    return {"device": torch.cuda.get_device_name(), "python": platform.python_version(), **packages}


def package_digest() -> str:
    """SHA-256 of every file of opfuse: what is measured and tested with the same digest ran the same code."""
    package = Path(opfuse.__file__).parent
    files = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def moment() -> dict[str, str]:
    """When something is measured, and of which code."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "kernels_digest": sources_digest(), "package_digest": package_digest()}


def stamp(script: str) -> dict[str, Any]:
    """Everything but the results."""
    return {**moment(), "versions": versions(), "script": script}


def device_file() -> Path:
    """The file of this device's figures: ``h200.json`` for an NVIDIA H200."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return RESULTS / f"{re.sub('[^0-9a-z]+', '_', name)}.json"
