"""No test fails because a machine is slow."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
LIMITED = re.compile(r"\b(?:deadline|timeout)=|\.(?:wait|join)\(\d")
"""A limit of time, for an example of hypothesis or for what another thread or process does."""
ALLOWED = ("conftest.py", "distributed/running.py", "test_speed.py")
"""The settings of hypothesis; collectives, which want some limit."""


def test_no_test_has_a_limit_of_its_own() -> None:
    files = sorted(path for path in TESTS.rglob("*.py") if not path.as_posix().endswith(ALLOWED))
    found = [
        (path.name, line) for path in files for line in path.read_text(encoding="utf-8").splitlines() if LIMITED.search(line)
    ]
    assert found == []
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
