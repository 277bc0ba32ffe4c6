"""Certificates on a device: what is recorded there passes as if it were not, and planted faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opfuse.cli.certify import OPS, QUANTIZERS, certify
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.products import certificate, native
from opfuse.kernels.products.backends import BACKENDS, Backend, LibraryOperand, backend_of
from opfuse.kernels.products.certificate import certified, examine
from opfuse.recipes.availability import device_arch

HERE = {
    family: row
    for family, rows in BACKENDS.items()
    if isinstance(row := backend_of(rows, native.machine(device_arch())), Backend)
}


@pytest.mark.parametrize("family", HERE)
def test_every_product_of_the_device_passes_as_if_nobody_had_tried_it(
    family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unrecorded = HERE[family]._replace(recorded=False)
    monkeypatch.setitem(certificate.BACKENDS, family, (unrecorded,))
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(certificate, "_cache", lambda: CubinCache(tmp_path / "kept"))
    found = certified(family, device.index, native.machine(device_arch()), native.library_product)
    assert found.fault == ""
    certificate._known.clear()
    again = certificate.known_certificate(family, native.machine(device_arch()))
    assert again == found, "a certificate is kept beside the compiled kernels"


def swapped(operand: LibraryOperand) -> LibraryOperand:
    """Scales from the last to the first."""
    if operand.scales[0].numel() == 1:
        return operand._replace(scales=[operand.scales[0] * 2])
    scale = operand.scales[0]
    flipped = scale.flatten().flip(0)
    return operand._replace(scales=[flipped.as_strided(scale.shape, scale.stride())])


def without_tail(operand: LibraryOperand) -> LibraryOperand:
    codes = operand.codes.view(torch.uint8).clone()
    codes[:, codes.shape[1] // 128 * 128 :] = 0
    return operand._replace(codes=codes.view(operand.codes.dtype))


def transposed(operand: LibraryOperand) -> LibraryOperand:
    codes = operand.codes.view(torch.uint8)
    turned = torch.empty_like(codes).copy_(codes.flatten().view(codes.shape[::-1]).t())  # one line keeps strides that BLAS takes
    return operand._replace(codes=turned.view(operand.codes.dtype))


@pytest.mark.parametrize("fault", [swapped, without_tail, transposed])
@pytest.mark.parametrize("family", HERE)
def test_planted_faults_are_found(family: str, fault, device: torch.device) -> None:
    row = HERE[family]
    spoiled = row._replace(operand=lambda plane, is_right: fault(row.operand(plane, is_right)))
    assert "element (" in examine(family, spoiled, native.library_product, device).fault


def test_doctor_certifies_products_casts_and_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(as_json=False), capsys.readouterr().out
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*QUANTIZERS, *OPS))
    assert "x bf16" in shown
