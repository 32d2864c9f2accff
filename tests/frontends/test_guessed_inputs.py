"""Random inputs for models without examples: the size is found by shapes alone, and memory is bounded."""

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.frontends.guessed_inputs import guessed_inputs
from lrpfx.pipeline import normal_form


def unverified(model):
    """The reasons in the history why stages are not verified."""
    stages = lrpfx.history(lrpfx.transform(model.eval(), EpsilonPlus()))
    return {stage.unverified for stage in stages if stage.unverified}


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(6, 4, 3, groups=2), nn.Conv1d(4, 4, 2, groups=4), nn.Conv3d(2, 3, 2), nn.Linear(3, 2)]
)
def test_random_inputs_fit_the_first_layer(layer):
    assert not unverified(nn.Sequential(layer, nn.ReLU()))


@pytest.mark.parametrize("size", [4, 6, 8, 16, 28, 32, 64, 96, 128, 224, 256, 299, 384])
def test_random_inputs_have_the_usual_sizes(size):
    assert not unverified(nn.Sequential(nn.Conv1d(2, 1, 1), nn.Flatten(), nn.Linear(size, 3)))


class Difference(nn.Module):
    """Two inputs of one shape, in batches of one size."""

    def __init__(self, layer, *size):
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x, y):
        return self.layer(torch.tanh(x) - torch.tanh(y)).view(self.size)


@pytest.mark.parametrize(
    ("layer", "size"),
    [(nn.Linear(5, 3), (7, 3)), (nn.Linear(5, 3), (1, 15)), (nn.Conv2d(3, 4, 3), (64, -1)), (nn.Linear(5, 3), (-1, 3))],
)
def test_random_inputs_of_several_arguments_and_of_other_batches(layer, size):
    model = Difference(layer, *size)
    assert not unverified(model)


def test_random_inputs_of_one_shape_differ():
    """A graph that confuses them would not be verified by equal ones."""
    program, _ = normal_form(Difference(nn.Linear(5, 3), -1, 3).eval())
    first, second = guessed_inputs(program).args
    assert first.shape == second.shape == (2, 5) and not torch.equal(first, second)


class Attention(nn.Module):
    """Every pixel attends to every pixel."""

    def __init__(self, channels=8):
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(channels, channels, 1) for _ in range(3))

    def forward(self, x):
        query, key, value = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        weights = (query.transpose(1, 2) @ key).softmax(-1)
        return x + (value @ weights.transpose(1, 2)).reshape(x.shape)


def with_attention(size):
    """A network that takes images of one size only."""
    layers = (nn.Conv2d(3, 8, 1), nn.ReLU(), Attention(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * size * size, 3))
    return nn.Sequential(*layers)


def within_memory():
    """Run in a process with little memory: see the test below."""
    torch.ones(8, 8) @ torch.ones(8, 8)  # threads and buffers of torch
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 800 * 2**20,) * 2)
    print(len(unverified(with_attention(6))), *unverified(with_attention(224)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
@pytest.mark.thorough
def test_a_guess_takes_little_memory():
    """At 64 pixels, attention over all pixels takes 256 MiB, and at 384 pixels 324 GiB."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_guessed_inputs as tests; tests.within_memory()"
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 there are no example inputs, and random ones that fit the model would take 37."), (
        done.stdout
    )


def test_random_inputs_that_would_take_much_memory_are_not_made():
    assert unverified(nn.Sequential(nn.Conv3d(2, 64, 1), nn.Flatten(), nn.Linear(64 * 64**3, 1))) == {
        "there are no example inputs, and random ones that fit the model would take 0.4 GiB of memory"
    }
    assert not unverified(nn.Sequential(nn.Conv3d(2, 64, 1), nn.ReLU()))


class Chosen(nn.Module):
    """The number of rows of the result depends on values."""

    def forward(self, x):
        return nn.functional.relu(x)[(x > 0).all(1)].sum()


def test_shapes_that_depend_on_values_are_not_guessed():
    (reason,) = unverified(nn.Sequential(nn.Linear(3, 2), Chosen()))
    assert "depend on values" in reason


def test_the_seed_and_the_model_are_as_before():
    torch.manual_seed(5)
    model, state = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.random.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not unverified(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
