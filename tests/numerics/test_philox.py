"""Random bits and the rotation: known answers, independence of shape, orthogonality."""

import numpy as np
import pytest
import torch

from opfuse.numerics.hadamard import NO_SIGNS, SIGNS, rotate, unrotate
from opfuse.numerics.philox import STREAMS, draw_seed, philox, random_bytes


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in got) == words


def _philox_python(counter, key):
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("stream", STREAMS.values())
def test_g21_byte_of_an_element_depends_on_its_index_only(seed, stream):
    got = random_bytes(torch.tensor([seed]), 70, stream).tolist()
    for i in (0, 1, 4, 15, 16, 37, 69):
        words = _philox_python((i // 16, 0, stream, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        assert got[i] == (words[i % 16 // 4] >> (8 * (i % 4))) & 0xFF
    assert random_bytes(torch.tensor([seed]), 33, stream).tolist() == got[:33]


def test_random_bytes_are_uniform_and_streams_differ():
    seed = draw_seed(torch.device("cpu"))
    row, column = (random_bytes(seed, 1 << 18, stream) for stream in STREAMS.values())
    for octets in (row, column):
        counts = torch.bincount(octets, minlength=256)
        assert ((counts - 1024).double() ** 2 / 1024).sum() < 400  # chi-square, 255 degrees: p < 1e-8
    assert (row == column).double().mean() == pytest.approx(1 / 256, rel=0.2)


def test_seed_follows_the_default_generator():
    torch.manual_seed(3)
    a, b = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(draw_seed(torch.device("cpu")), a)
    assert not torch.equal(a, b)


def _matrix(signs):
    h = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    return np.diag(signs) @ h / 4


@pytest.mark.parametrize("signs", [SIGNS, NO_SIGNS], ids=["signs", "no signs"])
def test_rotation_is_the_product_with_the_signed_hadamard_matrix(signs):
    x = torch.randn(48, 160).bfloat16()
    exact = (x.double().numpy().reshape(-1, 16) @ _matrix(signs)).reshape(48, 160)
    rotated = rotate(x, signs)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, torch.from_numpy(exact).float().bfloat16())
    back = unrotate(rotated.float(), signs)
    assert (back - x.float()).norm() / x.float().norm() < 2**-8
    exact_back = unrotate(torch.from_numpy(exact).float(), signs)
    assert torch.allclose(exact_back, x.float(), atol=1e-5)


def test_the_fixed_signs():
    assert SIGNS == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def test_rotation_is_orthogonal_so_it_cancels_in_a_product():
    a, b = torch.randint(-8, 9, (4, 64)).bfloat16(), torch.randint(-8, 9, (5, 64)).bfloat16()
    exact = a.float() @ b.float().t()
    assert torch.equal(rotate(a, SIGNS).float() @ rotate(b, SIGNS).float().t(), exact)


def test_r18_rotation_spreads_a_nan_over_its_sixteen():
    x = torch.zeros(2, 32).bfloat16()
    x[1, 3] = float("nan")
    rotated = rotate(x, SIGNS)
    assert rotated[1, :16].isnan().all()
    assert not rotated[0].isnan().any()
    assert not rotated[1, 16:].isnan().any()


def test_r10_rotation_of_nothing():
    assert rotate(torch.empty(0, 32).bfloat16(), SIGNS).shape == (0, 32)
    assert unrotate(torch.empty(32, 0), SIGNS).shape == (32, 0)
