"""What launches write into is of the dtypes and on the device of their arguments, whatever torch's defaults are."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from tests.kernels.catalogue import CASES

CPU = torch.device("cpu")


def told(result: object) -> Iterator[object]:
    """Of every tensor in a result: its shape, dtype and device."""
    if isinstance(result, torch.Tensor):
        yield tuple(result.shape), result.dtype, result.device
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from (key, *told(value))
    elif isinstance(result, Sequence):
        for value in result:
            yield from told(value)
    else:
        yield result


def nothing(*_: object, **__: object) -> None:
    """A launcher that launches nothing."""


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """A default dtype that no kernel takes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kernel", list(CASES), ids=lambda kernel: kernel.name)
def test_a_launch_gives_the_tensors_of_its_definition(kernel):
    """The default device has no values, so that what is computed there cannot be taken for a result."""
    for name, case in list(CASES[kernel].items())[::14]:
        with torch.device("meta"):
            (args, kwargs), again = case(CPU), case(CPU)
            with wide():
                wanted = [*told(kernel.reference(*args, **kwargs))]
                assert [*told(kernel.run(nothing, *again.args, **again.kwargs))] == wanted, name
