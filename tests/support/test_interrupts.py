"""Ctrl-C at any moment leaves the process as it was."""

import gc
import random
import signal
import threading
import time

import pytest
import torch
from helpers import small_net
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.support.interrupts import undisturbed, young_collections

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("heard_interrupts")]

METHODS = ("__call__", "__getattr__", "__setattr__", "forward")


def state_of_the_process():
    return (
        {name: getattr(nn.Module, name) for name in METHODS},
        torch.is_grad_enabled(),
        gc.get_threshold(),
        torch.fx._symbolic_trace.is_fx_tracing(),
        torch.compiler.is_exporting(),
        len(_get_current_function_mode_stack()) + len(_get_current_dispatch_mode_stack()),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
    )


def state_of_the_model(model):
    """The attributes, children, parameters and buffers of each module, all by identity."""
    return {
        name: [
            {key: id(value) for key, value in values.items()}
            for values in (vars(module), module._parameters, module._buffers, module._modules)
        ]
        for name, module in model.named_modules()
    }


def seconds_of(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interrupted(work, seconds):
    """Run `work` and interrupt it after some time; whether it was."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def transformed(model, x):
    lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)


def exported(model, x):
    lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x, capture="export")


def registered(model, x):
    with EpsilonPlusFlat(canonizers=[lrpfx.canonizers.SequentialMergeBatchNorm()]).context(model) as layers:
        layers(x.clone().requires_grad_())[:, 0].sum().backward()


def lowered(model, x):
    lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), x)


TIMES = {transformed: 140, registered: 130, exported: 25, lowered: 5}


@pytest.mark.parametrize(
    "work, times",
    [
        pytest.param(work, times, id=f"{work.__name__}-{times}", marks=marks)
        for work, most in TIMES.items()
        for times, marks in ((most // 2, []), (most, [pytest.mark.slow]))
    ],
)
def test_random_interrupts(work, times):
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    expected, before = model(x), state_of_the_process()
    modules = state_of_the_model(model)
    generator, found = random.Random(0), 0
    longest = min(seconds_of(lambda: work(model, x)) for _ in range(3))
    for _ in range(times):
        found += interrupted(lambda: work(model, x), generator.uniform(0.0005, longest))
        assert state_of_the_process() == before
        assert state_of_the_model(model) == modules
    assert found >= 0.3 * times
    assert torch.equal(model(x), expected) and nn.Linear(2, 2)(torch.rand(1, 2)).shape == (1, 2)
    transformed(model, x)


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return lrpfx.lower(lrpfx.transform(small_net(), EpsilonPlusFlat()), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.4])
@pytest.mark.parametrize("work", ["load", "save", "run"])
def test_random_interrupts_of_artefacts(work, share, program, tmp_path):
    x, index = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    path = lrpfx.save(program, tmp_path / "model.pt2")
    runner, before, generator, found = lrpfx.load(path), state_of_the_process(), random.Random(0), 0
    expected = runner(x, index)["relevance"]
    works = {
        "load": (lambda: lrpfx.load(path), 20),
        "save": (lambda: lrpfx.save(program, path), 10),
        "run": (lambda: [runner(x, index) for _ in range(10)], 150),
    }
    function, times = works[work][0], int(share * works[work][1])
    longest = min(seconds_of(function) for _ in range(3))
    for _ in range(times):
        found += interrupted(function, generator.uniform(0.0005, longest))
        assert state_of_the_process() == before and len(list(tmp_path.iterdir())) == 1
    assert found >= 0.3 * times
    assert torch.equal(lrpfx.load(path)(x, index)["relevance"], expected) and isinstance(torch.rand(2).tolist()[0], float)


def test_the_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), undisturbed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it waited")
    with pytest.raises(KeyboardInterrupt), undisturbed():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_exception_that_does_not_wait_leaves_no_patch():
    """Such as the one that a debugger or a watchdog raises in the thread that traces."""

    class Raising(nn.Module):
        def forward(self, x):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = state_of_the_process()
    with pytest.raises(KeyboardInterrupt):
        lrpfx.transform(Raising().eval(), EpsilonPlusFlat())
    assert state_of_the_process() == before


def test_other_threads_need_no_signals():
    results = []
    thread = threading.Thread(target=lambda: results.append(lrpfx.transform(small_net(), EpsilonPlusFlat())))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_full_collections_wait_for_the_end_of_a_compilation():
    class Watching(nn.Module):
        def forward(self, x):
            seen.append(gc.get_threshold())
            raise ValueError("the forward fails")

    seen, before = [], gc.get_threshold()
    for compiling in (lambda model: lrpfx.transform(model, EpsilonPlusFlat(), torch.randn(2, 3)), lrpfx.capture):
        seen.clear()
        with pytest.raises(lrpfx.errors.LrpfxError, match="the forward fails"):
            compiling(Watching().eval())
        assert gc.get_threshold() == before
        assert all(one[:2] == before[:2] and one[2] > 1e9 for one in seen) and seen


def test_threads_that_compile_at_once_leave_the_collector_as_it_was():
    before = gc.get_threshold()
    entered, left = threading.Event(), threading.Event()

    def compile_in_between():
        with young_collections():
            entered.set()
            left.wait(10)

    with young_collections():
        other = threading.Thread(target=compile_in_between)
        other.start()
        assert entered.wait(10)
    left.set()
    other.join(10)
    assert gc.get_threshold() == before
