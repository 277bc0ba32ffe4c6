"""``opfuse doctor``: versions, the device, and how each recipe runs here and elsewhere."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import opfuse
import opfuse.inspect.casts
import opfuse.ops  # these two register all kernels
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.environment import SWITCHES, VARIABLES, faults
from opfuse.kernels.engine.cubins import location, private
from opfuse.kernels.products.certificate import wrong_here
from opfuse.kernels.products.native import machine as machine_with
from opfuse.recipes import RECIPES, support, support_matrix
from opfuse.recipes.availability import device_arch
from opfuse.recipes.settings import misread, settings_of
from opfuse.torch_private.table import TRIED
from opfuse.torch_private.table import faults as torch_faults

PACKAGES = ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvmath-python", "pydantic", "ruamel.yaml")
"""Distributions whose version matters; CuPy comes in one for each major version of CUDA."""


def doctor(*, only: str | None, as_json: bool) -> None:
    """Tell what this machine runs natively, and what it emulates; ``only``: one of :data:`SECTIONS`."""
    chosen = {name: section for name, section in SECTIONS.items() if only in (None, name)}
    if as_json:
        echo_json({name: found() for name, (found, _) in chosen.items()})
        return
    for found, show in chosen.values():
        show(found())


def _print_machine(found: Any) -> None:
    echo("\n".join(f"{name:<14}{value}" for name, value in found.items()))


def _print_environment(found: Any) -> None:
    for name, meaning in found.items():
        value = os.environ[name].strip()
        echo(f"{name}={value}: {_effect(name, value, meaning)}")
    if not found:
        echo("no variable of opfuse is set")
    echo("")


def _effect(name: str, value: str, meaning: str) -> str:
    """What this value does. meaning: as in VARIABLES, where that of a switch begins with the value that has an effect."""
    if name not in SWITCHES or value not in ("0", "1"):
        return meaning
    does = f"{value}: "
    return meaning.removeprefix(does) if meaning.startswith(does) else f"as if it were not set; {meaning}"


def _print_torch(found: Any) -> None:
    if found["faults"]:
        echo(f"torch {found['installed']} differs from those that opfuse was tried with ({', '.join(found['tried'])}):")
        echo("\n".join(f"- {fault}" for fault in found["faults"]) + "\n")
    else:
        echo(f"torch {found['installed']} has all that opfuse takes of it beside its public interface, checked now\n")


def _print_wrong(found: Any) -> None:
    if found:
        rows = [*found.items()]
        show_rows(("product or kernel", "what was wrong"), rows, title="wrong on this device, so emulated or computed by torch")


def _print_recipes(found: Any) -> None:
    show_rows(("recipe", "status", "reason"), [(kind, *row.values()) for kind, row in found.items()], title="here")


def _print_matrix(found: Any) -> None:
    archs = list(dict.fromkeys(row["arch"] for row in found))
    cells = {kind: [row["status"] for row in found if row["kind"] == kind] for kind in RECIPES}
    rows = [(kind, *row) for kind, row in cells.items()]
    show_rows(("recipe", *archs), rows, title="by compute capability (0.0: CPU)")


def machine() -> dict[str, str]:
    """Versions and the device, as text."""
    major, minor = device_arch()
    device = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}" if torch.cuda.is_available() else "CPU only"
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    packages = {name: _installed(name) for name in PACKAGES}
    return {
        "opfuse": opfuse.__version__,
        "python": python,
        **packages,
        "torch's CUDA": torch.version.cuda or "none",
        "device": device,
        "kernel cache": f"{location()}{f': left alone, {fault.got}' if (fault := private(location())) else ''}",
    }


def installed_torch() -> dict[str, Any]:
    """What is gone or behaves otherwise in this torch of the names that torch does not promise to keep."""
    return {"installed": torch.__version__, "tried": list(TRIED), "faults": [*torch_faults(slow=False)]}


def environment() -> dict[str, str]:
    """What each variable does that is set: those of opfuse, those that stand in for fields of recipes, those nothing reads."""
    fields: dict[str, str] = {}
    for kind, cls in RECIPES.items():
        for field, (_, rule) in settings_of(cls).items():
            for name in rule.environment if rule is not None else ():
                fields[name] = f"the {field} of recipes that are given none" + ("" if name in fields else f", such as {kind}")
    mistyped = {name: f"{fault.problem}; {fault.cure}" for name, fault in faults().items()}
    mistyped |= {name: str(error) for cls in RECIPES.values() for name, error in misread(cls).items()}
    return {name: text for name, text in {**fields, **VARIABLES, **mistyped}.items() if os.environ.get(name)}


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def wrong() -> dict[str, str]:
    """What was compared with its definition on this device, and is not used since it was wrong; the first fault of each."""
    return wrong_here(machine_with(device_arch()))


def recipes() -> dict[str, dict[str, str]]:
    """How each kind of recipe runs here, and why."""
    found = {kind: support(kind) for kind in RECIPES}
    return {kind: {"status": row.status, "reason": row.reason} for kind, row in found.items()}


def matrix() -> list[dict[str, str]]:
    """How each kind of recipe runs on each compute capability."""
    return [{**row._asdict(), "arch": f"{row.arch[0]}.{row.arch[1]}"} for row in support_matrix()]


SECTIONS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "machine": (machine, _print_machine),
    "torch": (installed_torch, _print_torch),
    "environment": (environment, _print_environment),
    "wrong": (wrong, _print_wrong),
    "recipes": (recipes, _print_recipes),
    "matrix": (matrix, _print_matrix),
}
"""What is found, and what tells of it."""
