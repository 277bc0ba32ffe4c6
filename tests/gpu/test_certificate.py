"""Certificates on a device: what is recorded there passes as if it were not, and planted faults are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from opfuse.cli.certify import certified_kernels, certify
from opfuse.errors import OpfuseWarning, PlanMissError
from opfuse.formats import E4M3, mxfp8
from opfuse.kernels.casts.tensor import cast_mx
from opfuse.kernels.casts.trials import DRAWS, layouts
from opfuse.kernels.engine import certificates, registry
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.products import certificate, native
from opfuse.kernels.products.backends import BACKENDS, Backend, LibraryOperand, backend_of
from opfuse.kernels.products.certificate import certified_product, examine
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
    monkeypatch.setattr(certificates, "_known", {})
    monkeypatch.setattr(certificates, "_cache", lambda: CubinCache(tmp_path / "kept"))
    found = certified_product(family, device.index, native.machine(device_arch()), native.library_product)
    assert found.fault == ""
    certificates._known.clear()
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


@pytest.mark.parametrize("kernel", certified_kernels(), ids=lambda kernel: kernel.name)
def test_every_kernel_of_a_cast_a_chain_or_a_norm_passes(kernel: registry.Kernel, device: torch.device) -> None:
    assert registry.examine(kernel, device).fault == ""


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is recorded, and nobody has tried anything."""
    monkeypatch.setattr(certificates, "RECORDED", ((99, 0), (99, 0)))
    monkeypatch.setattr(certificates, "_known", {})
    monkeypatch.setattr(certificates, "_cache", lambda: CubinCache(tmp_path / "kept"))
    for kernel in registry.kernels():
        kernel.right.clear()
    yield
    for kernel in registry.kernels():
        kernel.right.clear()


def cast_of(device: torch.device, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    x = DRAWS[0].matrix().to(device) if x is None else x
    return [*registry.tensors_in(cast_mx(x, layouts(mxfp8(E4M3), tuple(x.shape))))]


@pytest.mark.usefixtures("unproved")
def test_the_first_launch_on_an_unproved_device_tries_the_kernel(device: torch.device) -> None:
    wanted = cast_of(torch.device("cpu"))
    assert all(torch.equal(got.cpu(), each) for got, each in zip(cast_of(device), wanted, strict=True))
    assert cast_mx.right == {device.index: True}
    assert certificates.certificate_of("kernel cast_mx", device.index).passed
    cast_mx.right.clear()
    certificates._known.clear()
    assert cast_mx.is_right(device.index), "by what is kept beside the compiled kernels"


@pytest.mark.usefixtures("unproved")
def test_a_kernel_that_is_wrong_is_told_of_once_and_computed_by_its_definition(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches do nothing here."""
    monkeypatch.setattr(registry, "launch", lambda *launched, **more: None)
    with pytest.warns(OpfuseWarning, match="kernel cast_mx on .*: wants the bits of its definition, got .*element") as told:
        made = [cast_of(device) for _ in range(2)]
    assert len(told) == 1
    wanted = cast_of(torch.device("cpu"))
    assert all(torch.equal(got.cpu(), each) for one in made for got, each in zip(one, wanted, strict=True))


@pytest.mark.usefixtures("unproved")
def test_a_kernel_that_was_never_tried_is_refused_while_a_stream_is_captured(device: torch.device) -> None:
    x = DRAWS[0].matrix().to(device)
    with (
        pytest.raises(PlanMissError, match="run the same call once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cast_of(device, x)


def test_doctor_certifies_products_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(as_json=False), capsys.readouterr().out
    shown = capsys.readouterr().out
    assert all(kernel.name in shown for kernel in certified_kernels())
    assert "x bf16" in shown
