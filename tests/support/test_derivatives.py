"""Derivatives that are interrupted leave nothing behind."""

import itertools
import signal
import sys

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, MixedComposite, NameMapComposite
from lrpfx.rules import Epsilon, Gamma
from lrpfx.support.derivatives import vjp


def by_vjp(x):
    return vjp(torch.sin, x)[1](torch.ones_like(x))[0]


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


def test_interrupts_leave_nothing(heard_interrupts):
    x = torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(by_vjp(x), x.cos(), rtol=1e-15, atol=0)  # torch imports some of its modules now
    for step in itertools.count():
        is_over = interrupted(lambda: by_vjp(x), step)
        assert torch._C._functorch.peek_interpreter_stack() is None, step
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, step
        if is_over:
            break
    assert step > 100
    torch.testing.assert_close(by_vjp(x), x.cos(), rtol=1e-15, atol=0)


class Sine(torch.autograd.Function):
    """As older code writes it: one method for the forward pass and its context, which torch.func refuses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class OfSine(nn.Module):
    def forward(self, x):
        return Sine.apply(x)


class OfTorch(nn.Module):
    def forward(self, x):
        return torch.sin(x)


@pytest.mark.parametrize("rule", [Epsilon(), Gamma()])
@pytest.mark.parametrize("fold", [True, False])
def test_modules_with_an_autograd_function_have_rules(rule, fold):
    results = []
    for layer in (OfSine(), OfTorch()):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)).eval()
        x = torch.randn(2, 4, requires_grad=True)
        composite = MixedComposite([NameMapComposite([(["1"], rule)]), EpsilonPlus()])
        explain_model = lrpfx.transform(model, composite, fold=fold)
        relevance = torch.autograd.grad(explain_model(x)[:, 1].sum(), x, create_graph=not fold)[0]
        accounts = lrpfx.ledger(explain_model, x.detach(), 1)
        assert accounts.unexplained <= 1e-12
        penalty = []
        if not fold:
            with explain_model.inactive():
                penalty = torch.autograd.grad(relevance.square().sum(), list(explain_model.parameters()))
        results.append([relevance.detach(), torch.tensor(accounts.total("bias")), *penalty])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, 1e-12)
