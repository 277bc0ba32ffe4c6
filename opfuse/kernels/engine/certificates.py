"""Certificates: what this project has not tested on a device is tried there before its first use.

A trial compares with a definition on the CPU. What passes is used from then on. Its certificate is kept beside the compiled
kernels, for this code, device, driver and library. What fails, or raises, is computed another way, and an OpfuseWarning tells the
first wrong element.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from opfuse.errors import OpfuseWarning, PlanMissError, UnsupportedError, describe
from opfuse.events import silenced
from opfuse.kernels.engine.bindings import runtime
from opfuse.kernels.engine.cubins import CubinCache, root
from opfuse.kernels.engine.sources import sources_digest
from opfuse.torch_private.dispatch import without_modes

RECORDED = ((9, 0), (10, 0))
"""Compute capabilities on which this project tests and times its kernels: from the first one to, not including, the second."""


def is_recorded_arch(arch: Sequence[int]) -> bool:
    """Whether this project tests its kernels on devices of compute capability ``arch``."""
    since, below = RECORDED
    return since <= tuple(arch) < below


class Certificate(NamedTuple):
    """What trials found. fault: the first wrong element, or what was raised; an empty string if there is none."""

    fault: str

    @property
    def passed(self) -> bool:
        """Whether what was tried may be used."""
        return not self.fault


class Tried(NamedTuple):
    """What is certified. name: what people call it. wanted: what it is compared with. instead: what happens where it fails."""

    key: str
    name: str
    wanted: str
    instead: str


def certified(tried: Tried, device: int, examine: Callable[[], Certificate]) -> Certificate:
    """The certificate of what ``examine`` tries on a CUDA device, which it does, and waits for, if no certificate is known.

    PlanMissError if a stream is being captured and it was never tried. Trials see no recorder, no mode of the caller and no
    autograd.
    """
    if (known := _known.get((tried.key, device))) is None:
        known = _known[tried.key, device] = _found(tried, device, examine)
    return known


def certificate_of(key: str, device: int) -> Certificate | None:
    """The certificate of what was tried on a CUDA device before; None if it was not, as where CuPy is missing."""
    try:
        return _known.get((key, device)) or _read(_digest(key, device))
    except UnsupportedError:  # who only asks what is known, as under OPFUSE_REFERENCE=1, does without
        return None


def keep(tried: Tried, device: int, found: Certificate) -> None:
    """Keep what trials found on a CUDA device, in the place of what they found before, for later processes."""
    content = {"what": tried.name, "fault": found.fault, "of": facts(device)}
    _cache().replace(_digest(tried.key, device), json.dumps(content).encode(), _CERTIFICATE)
    _known[tried.key, device] = found


_CERTIFICATE = "certificate"
_known: dict[tuple[str, int], Certificate] = {}
"""By what was tried and the device, those that this process knows."""


def _found(tried: Tried, device: int, examine: Callable[[], Certificate]) -> Certificate:
    digest = _digest(tried.key, device)
    if (kept := _read(digest)) is None:
        if torch.cuda.is_current_stream_capturing():
            wanted, cure = "what is certified, during graph capture", "run the same call once before the capture"
            raise PlanMissError(describe(tried.name, wanted=wanted, got="its first use", cure=cure))
        with ExitStack() as stack:
            around = torch.cuda.device(device), without_modes(), silenced(), torch.inference_mode(mode=False), torch.no_grad()
            for each in around:
                stack.enter_context(each)
            kept = examine()
        keep(tried, device, kept)
    if not kept.passed:
        where = f"{tried.name} on {torch.cuda.get_device_name(device)}"
        cure = f"report what `opfuse doctor --certify` prints; {tried.instead}"
        warnings.warn(describe(where, wanted=tried.wanted, got=kept.fault, cure=cure), OpfuseWarning, stacklevel=2)
    return kept


def _read(digest: str) -> Certificate | None:
    content = _cache().find(digest, _CERTIFICATE)
    return None if content is None else Certificate(json.loads(content)["fault"])


@functools.cache
def _cache() -> CubinCache:
    return CubinCache(root() / "certificates-v1")


@functools.cache
def facts(device: int) -> dict[str, Any]:
    """What certificates of a CUDA device depend on: another code, library or driver is tried anew."""
    return {
        "device": torch.cuda.get_device_name(device),
        "compute capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "driver": runtime().driverGetVersion(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        **{name: version(name) for name in ("nvidia-cublas", "nvidia-cublas-cu12") if _is_installed(name)},
        "code": _code()[:16],
    }


@functools.cache
def _digest(key: str, device: int) -> str:
    return hashlib.sha256(json.dumps([key, facts(device)]).encode()).hexdigest()[:32]


_code = functools.cache(sources_digest)


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
