"""Random networks as plans: a list of steps with tracked shapes, which can be printed as a torch.nn.Module and made smaller."""

import itertools
import linecache
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

SIGNAL, CONSTANT, INTEGER, BOOLEAN = "signal", "constant", "integer", "boolean"
#: Values have at most this many entries for each sample, so that networks stay small.
LARGEST = 600
BATCH = 3
CLASSES = 3
_numbers = itertools.count()


class UnfitError(Exception):
    """No value of the network has the shape that a feature needs."""


@dataclass(frozen=True)
class Value:
    """A variable of the network's forward. `shape` is without the batch, which is always dimension 0 where `batched`."""

    name: str
    shape: tuple[int, ...]
    kind: str = SIGNAL
    batched: bool = True

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Input:
    """An argument of the network's forward, and an expression for its example."""

    value: Value
    example: str


@dataclass(frozen=True)
class Step:
    """Statements that make one value out of others."""

    feature: str
    lines: tuple[str, ...]
    reads: tuple[str, ...]
    makes: Value
    modules: tuple[tuple[str, str], ...] = ()  # attributes of the network that it needs, with their source
    stand_in: str = ""  # a value of the same shape and kind, which can take its place


@dataclass(frozen=True)
class Network:
    """A network as a plan. `result`: the expression that it returns; `output`: which of several outputs is explained."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    result: str
    output: str | int | None = None

    @property
    def features(self) -> list[str]:
        """Names of the features that it is made of."""
        return [step.feature for step in self.steps]

    def source(self, held: Sequence[str] = (), returns: str = "") -> str:
        """The network as a class. The values in `held` are read from buffers instead of being computed."""
        lines = ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        declared = dict(itertools.chain.from_iterable(step.modules for step in self.steps))
        lines += [f"        self.{name} = {source}" for name, source in declared.items()]
        arguments = ", ".join(argument.value.name for argument in self.inputs)
        lines += ["", f"    def forward(self, {arguments}):"]
        for step in self.steps:
            name = step.makes.name
            lines += [f"        {name} = self.held_{name}"] if name in held else [f"        {line}" for line in step.lines]
        return "\n".join([*lines, f"        return {returns or self.result}"])

    def examples(self) -> tuple[torch.Tensor, ...]:
        """The example inputs: a batch of `BATCH`."""
        torch.manual_seed(self.seed)
        return tuple(eval(argument.example, {"torch": torch}) for argument in self.inputs)

    def build(self, held: Sequence[str] = (), returns: str = "") -> nn.Module:
        """The network with its parameters, in evaluation mode."""
        text = self.source(held, returns)
        path = f"/networks/{self.seed}_{next(_numbers)}.py"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)  # error messages show the line
        names = {"torch": torch, "nn": nn, "F": functional}
        exec(compile(text, path, "exec"), names)
        torch.manual_seed(self.seed)
        model = randomized(names["Network"]())
        return model

    def constants(self) -> list[str]:
        """Names of the values that are computed from integers, truth values, comparisons or positions alone."""
        return [step.makes.name for step in self.steps if step.makes.kind == CONSTANT]

    def with_held_constants(self, examples: Sequence[torch.Tensor]) -> nn.Module:
        """The same network on these examples, in which every constant value is a buffer."""
        names = self.constants()
        values = self.build(returns="{" + ", ".join(f'"{name}": {name}' for name in names) + "}")(*examples)
        model = self.build(held=names)
        for name in names:
            model.register_buffer(f"held_{name}", values[name].detach())
        return model

    def reproduction(self, composite: str) -> str:
        """A script that makes the model, its inputs and the composite."""
        examples = "\n".join(f"{argument.value.name} = {argument.example}" for argument in self.inputs)
        names = ", ".join(argument.value.name for argument in self.inputs)
        return (
            "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\nimport lrpfx\n"
            "from fuzzing.network import randomized\nfrom lrpfx.composites import *\nfrom lrpfx.rules import *\n"
            "from lrpfx.types import *\n\ntorch.set_default_dtype(torch.float64)\n\n\n"
            f"{self.source()}\n\n\ntorch.manual_seed({self.seed})\n{examples}\ninputs = ({names},)\n"
            f"torch.manual_seed({self.seed})\nmodel = randomized(Network())\ncomposite = {composite}\n"
        )

    # --- making it smaller ---------------------------------------------------------------------------------------------

    def smaller(self) -> Iterator["Network"]:
        """Networks with a step less, or with an intermediate value as the output; the smallest first."""
        values = [step.makes for step in self.steps if step.makes.kind == SIGNAL and step.makes.name != self.result]
        for value in values:
            yield replace(self, result=value.name, output=None).without_unused()
        for number, step in enumerate(self.steps):
            if step.stand_in:
                renamed = [_renamed(later, step.makes.name, step.stand_in) for later in self.steps[number + 1 :]]
                result = _rename(self.result, step.makes.name, step.stand_in)
                yield replace(self, steps=(*self.steps[:number], *renamed), result=result).without_unused()

    def without_unused(self) -> "Network":
        """The network without the steps and inputs that its result does not need."""
        needed = _names(self.result)
        kept = []
        for step in reversed(self.steps):
            if step.makes.name in needed:
                kept.append(step)
                needed |= set(step.reads)
        inputs = tuple(argument for argument in self.inputs if argument.value.name in needed)
        return replace(self, steps=tuple(reversed(kept)), inputs=inputs or self.inputs[:1])


def _names(text: str) -> set[str]:
    return set("".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split())


def _rename(text: str, old: str, new: str) -> str:
    pieces, word = [], ""
    for letter in text + " ":
        if letter.isalnum() or letter == "_":
            word += letter
        else:
            pieces += [new if word == old else word, letter]
            word = ""
    return "".join(pieces)[:-1]


def _renamed(step: Step, old: str, new: str) -> Step:
    return replace(
        step,
        lines=tuple(_rename(line, old, new) for line in step.lines),
        reads=tuple(new if name == old else name for name in step.reads),
        stand_in=new if step.stand_in == old else step.stand_in,
    )


def randomized(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, with norms whose parameters and statistics matter; some batch norms scale by zero."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)) and module.weight is not None:
                module.weight.uniform_(-1.0, 1.5)
                module.bias.normal_()
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and torch.rand(()) < 0.1:
                    module.weight[0] = 0.0
    return model.eval()


class Builder:
    """Makes a network step by step: features ask it for values, modules and random choices."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.layers: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []  # name, source, shapes in and out
        self._counts: dict[str, int] = {}
        self._modules: list[tuple[str, str]] = []
        self._reads: list[str] = []

    # --- choices -------------------------------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def choice(self, options: Sequence):
        return self.random.choice(list(options))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self) -> float:
        """A constant of either sign, never zero."""
        return self.choice([-1, 1]) * round(self.random.uniform(0.2, 1.5), 2)

    # --- values --------------------------------------------------------------------------------------------------------

    def value(self, kind: str, fits: Callable[[Value], bool]) -> Value:
        """A value that fits, likely one that was made late; `UnfitError` where there is none."""
        found = [value for value in self.values if value.kind == kind and fits(value)]
        if not found:
            raise UnfitError
        place = min(int(self.random.expovariate(0.7)), len(found) - 1)
        self._reads.append(found[-1 - place].name)
        return found[-1 - place]

    def signal(self, *ranks: int, fits: Callable[[Value], bool] = lambda value: True) -> Value:
        """A value that carries relevance, of one of the given numbers of dimensions (the batch counts), or of any."""
        return self.value(SIGNAL, lambda value: (not ranks or len(value.shape) + 1 in ranks) and fits(value))

    def like(self, other: Value) -> Value:
        """A signal of the same shape, perhaps `other` itself."""
        return self.value(SIGNAL, lambda value: value.shape == other.shape)

    def argument(self, name: str, shape: tuple[int, ...], example: str, kind: str = SIGNAL) -> Value:
        value = Value(name, shape, kind)
        self.inputs.append(Input(value, example))
        self.values.append(value)
        return value

    # --- statements ----------------------------------------------------------------------------------------------------

    def name(self, prefix: str) -> str:
        """A name that nothing has yet."""
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        return f"{prefix}{self._counts[prefix]}"

    def module(self, source: str, prefix: str = "layer") -> str:
        """An attribute of the network, as `self.name`."""
        name = self.name(prefix)
        self._modules.append((name, source))
        return f"self.{name}"

    def layer(self, source: str, into: tuple[int, ...], out: tuple[int, ...]) -> str:
        """A module that may be called again on another value of the shape `into`."""
        name = self.module(source)
        self.layers.append((name, source, into, out))
        return name

    def shared(self, name: str, source: str) -> str:
        """A module that an earlier step declared."""
        self._modules.append((name.removeprefix("self."), source))
        return name

    def local(self) -> str:
        """The name of a variable that only this step reads."""
        return self.name("t")

    def emit(self, *lines: str, shape: Sequence[int], kind: str = SIGNAL, batched: bool = True) -> Value:
        """A step: statements, and the expression of the value that it makes."""
        value = Value(self.name("c" if kind == CONSTANT else "v"), tuple(shape), kind, batched)
        if value.size > LARGEST or not all(shape):
            raise UnfitError
        same = [
            other for other in self.values if other.name in self._reads and other.shape == value.shape and other.kind == kind
        ]
        reads, modules = tuple(dict.fromkeys(self._reads)), tuple(self._modules)
        stand_in = same[0].name if same else ""
        self.steps.append(Step("", (*lines[:-1], f"{value.name} = {lines[-1]}"), reads, value, modules, stand_in))
        self.values.append(value)
        self.discard()
        return value

    def name_feature(self, name: str) -> None:
        """Note which feature made the last step."""
        self.steps[-1] = replace(self.steps[-1], feature=name)

    def discard(self) -> None:
        """Forget what was asked for since the last step."""
        self._modules, self._reads = [], []
