"""Derivatives that are interrupted leave nothing behind."""

import itertools
import signal
import sys

import pytest
import torch

from lrpfx.support.derivatives import jvp, vjp


def by_vjp(x):
    return vjp(torch.sin, x)[1](torch.ones_like(x))[0]


def by_jvp(x):
    return jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def interrupted(work, step):
    """Whether work was over before this line of it and of what it calls, where it is interrupted."""
    lines = itertools.count()

    def trace(frame, event, argument):
        if event == "line" and next(lines) == step:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


@pytest.mark.parametrize("work", [by_vjp, by_jvp])
def test_interrupts_leave_nothing(work, heard_interrupts):
    x = torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(work(x), x.cos(), rtol=1e-15, atol=0)  # torch imports some of its modules now
    for step in itertools.count():
        is_over = interrupted(lambda: work(x), step)
        assert torch._C._functorch.peek_interpreter_stack() is None, step
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, step
        if is_over:
            break
    assert step > 100
    torch.testing.assert_close(work(x), x.cos(), rtol=1e-15, atol=0)
