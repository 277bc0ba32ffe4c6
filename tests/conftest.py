"""Every test starts from the same random state; the suite shares few cores, so torch runs on one.

Tests give recipes their fields as arguments: what the environment says of recipes is taken away. ``--row B06`` selects the tests
of a row of docs/acceptance.md, by the marker ``row``. ``--device cuda`` runs tests on tensors and modules of that device, which
they make there because it is torch's default; tests that speak of the CPU have the marker ``cpu`` and are left out.

No test fails because a machine is slow: hypothesis has no deadline, and who waits for a thread or a process waits without a
limit. What hangs ends by the one limit for all tests, ``timeout`` in pyproject.toml.
"""

import gc
import logging
import os
import sys

import hypothesis
import pytest
import torch

from opfuse.torch_private.autograd import saving_hooks
from tests.turns import leave_to_slow

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None  # it keeps Python's stack at each seed, for a device that may be used yet
for name in [name for name in os.environ if name.startswith("NVTE_") or name == "OPFUSE_BACKWARD_OVERRIDE"]:
    del os.environ[name]


def pytest_addoption(parser):
    parser.addoption("--row", action="append", default=[], metavar="ROW", help="run the tests of this row; may be repeated")
    parser.addoption("--device", type=torch.device, help="run tests on this device, instead of the CPU; not for tests/gpu")


def pytest_configure(config):
    """Before tests are imported, so that tensors of modules are there as well."""
    if config.getoption("--device") is not None:
        torch.set_default_device(config.getoption("--device"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    leave_to_slow(items)
    wanted, elsewhere = {row.upper() for row in config.getoption("--row")}, config.getoption("--device") is not None
    kept, left = [], []
    for item in items:
        asked = not wanted or any(wanted.intersection(marker.args) for marker in item.iter_markers("row"))
        (kept if asked and not (elsewhere and item.get_closest_marker("cpu")) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish():
    """What was collected stays until the end: no later search for garbage, of which tests ask for some, goes through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # most of what a search finds young is alive: types, plans, graphs
    # Pytest adds its handlers to the root and to each logger that keeps its records from it, six times a test; torch has sixty.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="module")
def _without_what_modules_left():
    """No search for garbage goes through what earlier modules have left in caches: a million objects in each full one.

    Nor does compiled code of theirs count toward the few graphs that torch makes of one forward: converted modules share theirs.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture
def few_samples(monkeypatch):
    """Validation takes a moment, of whatever is trained."""
    monkeypatch.setattr("opfuse.train.comparison.EVALUATION_SAMPLES", 64)


@pytest.fixture
def undrawn(monkeypatch):
    """Commands write files of plots without a picture, which takes half a second each; tests/train draws them."""
    for module in ("report", "study_report"):
        monkeypatch.setattr(f"opfuse.train.{module}._plot", lambda *_: b"")


@pytest.fixture
def own_pipelines(monkeypatch):
    """A trace has the pipelines that a test makes, and not the thousands that earlier tests have left in caches."""
    from opfuse.core.watched import all_enrolled

    before = {id(each): each for each in all_enrolled()}
    monkeypatch.setattr(
        "opfuse.runtime.plans.trace.all_enrolled", lambda: [each for each in all_enrolled() if id(each) not in before]
    )


@pytest.fixture(autouse=True)
def _without_hooks_left():
    """torch 2.11 leaves the hooks of a checkpoint whose function raised, until its generator is garbage: for the next test."""
    yield
    if saving_hooks(False) is not None:
        gc.collect()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20260101)
