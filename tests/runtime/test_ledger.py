"""What a call in a compiled graph writes down in place of autograd, and the memory that its results may have."""

from __future__ import annotations

import pytest
import torch

from opfuse.errors import SavedTensorError
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.runtime.compile.saved_call import apart
from tests.ops.test_op_errors import raised

pytestmark = pytest.mark.cpu


def products(x, factors, asked):
    """A tape of x * factor for every factor, one after another, of which all but the last are results too."""
    tape, made = BackwardTape([x, *factors], [x]), [x]
    for factor in factors:
        read = made[-1]
        saved = tape.save([read.detach(), factor])

        def backward(received, keep, saved=saved):
            asked.append(keep)
            value, factor = saved.unpack(keep)
            return [received[0] * factor, (received[0] * value).double()]

        made.append(read.detach() * factor.detach())
        tape.record([read, factor], made[-1:], backward)
    tape.close(made[1:])
    return tape, made[1:]


def test_gradients_are_those_of_autograd_in_shape_dtype_and_order_of_sums():
    x, factors, asked = torch.randn(4, 3), [torch.randn(4, 3), torch.randn(3), torch.randn(1)], []
    factors = [*factors, factors[0]]  # which takes all its gradients in its first place
    tape, _ = products(x, factors, asked)
    grads = [torch.randn(4, 3), None, torch.randn(4, 3), torch.randn(4, 3)]
    found = [tape.gradients(grads, keep=keep) for keep in (True, False)]
    given = [each.requires_grad_() for each in (x, *factors[:3])]
    results, y = [], x
    for factor in factors:
        y = y * factor
        results.append(y)
    wanted = torch.autograd.grad([results[i] for i in (0, 2, 3)], given, [grads[i] for i in (0, 2, 3)])
    for each in found:
        assert each[4] is None
        assert all(one.dtype == torch.float32 and one.shape == two.shape for one, two in zip(each, wanted))
        torch.testing.assert_close(each[:4], [*wanted])
    assert asked == [True] * 4 + [False] * 4
    with raised(SavedTensorError, RuntimeError, "one backward pass", "a second one"):
        tape.gradients(grads, keep=False)


def test_steps_whose_results_no_gradient_reaches_are_not_asked():
    asked = []
    tape, _ = products(torch.randn(3), [torch.randn(3), torch.randn(3)], asked)
    assert tape.gradients([None, None], keep=True) == [None] * 3
    assert tape.gradients([torch.ones(3), None], keep=False)[2] is None
    assert asked == [False]


def test_inputs_are_saved_as_copies_and_parameters_as_they_are():
    x, factor = torch.randn(3), torch.randn(3)
    wanted = x * factor
    tape, _ = products(x, [factor], [])
    x.zero_()  # as a compiler may
    assert torch.equal(tape.gradients([factor], keep=True)[1], wanted)
    factor.add_(1)
    with raised(SavedTensorError, RuntimeError, "as the forward pass left them", "changed in place"):
        tape.gradients([factor], keep=False)


def test_results_may_be_parts_of_one_block_and_nothing_else_of_others():
    block, other = torch.arange(32.0), torch.arange(8.0)
    one, two = block.split(16)
    crossing, shifted = block[8:24], block[1:17]
    made = apart([one, two], [other])
    assert [each.data_ptr() for each in made] == [one.data_ptr(), two.data_ptr()]
    assert not any(each._is_view() for each in made)
    for given, others in (([one, crossing], [other]), ([one], [block]), ([shifted], []), ([other, other], [])):
        made = apart(given, others)
        assert all(map(torch.equal, made, given))
        assert made[-1].data_ptr() != given[-1].data_ptr()


def test_what_is_saved_is_known_until_the_call_is_over_so_that_results_are_copies_of_it():
    x, factor = torch.randn(3), torch.randn(3)
    tape = BackwardTape([x, factor], [x])
    tape.save([x, factor])
    assert [each is factor for each in tape.saved] == [False, True]
    assert torch.equal(tape.saved[0], x)
    (made,) = apart([factor.view(3)], tape.saved)
    assert made.data_ptr() != factor.data_ptr()
    tape.close([])
    assert tape.saved == []


def test_a_write_to_a_watched_tensor_is_refused_though_no_step_has_saved_it():
    x, source = torch.randn(3), torch.randn(3)
    tape = BackwardTape([x], [x])
    tape.watch([source])
    tape.record([x], [y := 2 * x], lambda received, keep: [2 * received[0]])
    tape.close([y])
    assert torch.equal(tape.gradients([x], keep=True)[0], 2 * x)
    source.mul_(2)
    with raised(SavedTensorError, RuntimeError, "as the forward pass left them", "changed in place"):
        tape.gradients([x], keep=False)
