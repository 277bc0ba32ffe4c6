"""Everything here runs kernels, so it needs a CUDA device; elsewhere tests/kernels compiles the same kernels."""

import pytest
import torch


def pytest_pycollect_makeitem(collector, name, obj):
    """Without a device a test is skipped as one, not case by case: thousands of cases would only be counted."""
    if torch.cuda.is_available() or not collector.istestfunction(obj, name):
        return None
    item = pytest.Function.from_parent(collector, name=name)
    item.add_marker(pytest.mark.skip(reason="no CUDA device; counted without its cases"))
    return item


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
