"""Environment variables: one table holds all that is read, and names that are nearly in it are told."""

import re
from pathlib import Path

import pytest

import opfuse
from opfuse import environment
from opfuse.errors import OpfuseWarning


@pytest.fixture(autouse=True)
def fresh():
    """A process that has read no variable yet."""
    yield environment._warn_of_faults.cache_clear()
    environment._warn_of_faults.cache_clear()


def test_every_variable_that_the_package_names_is_in_the_table():
    package = Path(opfuse.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py") if path.name != "environment.py"]
    named = {name for text in texts for name in re.findall(r"""["'](OPFUSE_[A-Z_]+)["']""", text)}
    assert named == set(environment.VARIABLES)


def test_a_mistyped_variable_is_told_once_with_the_nearest(monkeypatch):
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERIDE", "dequantized")
    with pytest.warns(OpfuseWarning, match="got OPFUSE_BACKWARD_OVERIDE: nothing reads it.*mean 'OPFUSE_BACKWARD_OVERRIDE'"):
        recipe = opfuse.recipes.MXFP8BlockScaling()
    assert recipe.backward_override is None
    opfuse.recipes.MXFP8BlockScaling()  # where warnings are errors


def test_a_switch_that_is_neither_on_nor_off_is_told(monkeypatch):
    """Its default holds, as it did silently."""
    monkeypatch.setenv("OPFUSE_PROGRAMS", "false")
    with pytest.warns(OpfuseWarning, match=r"got OPFUSE_PROGRAMS: 'false' is neither 0 nor 1.*Cure: set it to 0: "):
        environment.variable("OPFUSE_TRACE")
    monkeypatch.setenv("OPFUSE_PROGRAMS", "0")
    assert environment.faults() == {}


def test_a_number_that_is_none_is_told(monkeypatch):
    """Its default holds."""
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", "512M")
    with pytest.warns(OpfuseWarning, match=r"got OPFUSE_PROGRAM_BYTES: '512M' is no whole number.*Cure: say bytes of the host"):
        assert environment.number("OPFUSE_PROGRAM_BYTES") == 1 << 29
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", "4096")
    assert environment.number("OPFUSE_PROGRAM_BYTES") == 4096
    assert environment.faults() == {}


def test_known_variables_and_those_of_others_are_not_told(monkeypatch):
    for name in (*environment.VARIABLES, "OTHER_OPFUSE_X", "NVTE_NO_SUCH"):
        monkeypatch.setenv(name, "1")
    assert environment.faults() == {}
    assert environment.variable("OPFUSE_DEBUG") == "1"
