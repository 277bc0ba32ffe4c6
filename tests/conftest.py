"""Every test starts from the same random state; the suite shares few cores, so torch runs on one.

Tests give recipes their fields as arguments: what the environment says of recipes is taken away. ``--row B06`` selects the tests
of a row of docs/acceptance.md, by the marker ``row``.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
for name in [name for name in os.environ if name.startswith("NVTE_") or name == "OPFUSE_BACKWARD_OVERRIDE"]:
    del os.environ[name]


def pytest_addoption(parser):
    parser.addoption("--row", action="append", default=[], metavar="ROW", help="run the tests of this row; may be repeated")


def pytest_collection_modifyitems(config, items):
    wanted = {row.upper() for row in config.getoption("--row")}
    if not wanted:
        return
    kept = [item for item in items if any(wanted.intersection(marker.args) for marker in item.iter_markers("row"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20260101)
