"""Every test starts from the same random state; the suite shares few cores, so torch runs on one."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20260101)
