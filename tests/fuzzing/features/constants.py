"""What is computed from integers, truth values, comparisons and positions alone, and what it is used for."""

from ..network import BOOLEAN, CONSTANT, INTEGER, Builder, Value
from .table import feature

_TO_FLOAT = (".float()", ".to(torch.float64)", ".double()", ".type(torch.get_default_dtype())")


@feature("constants")
def mask_of_tokens(b: Builder) -> None:
    tokens = b.value(INTEGER, lambda value: len(value.shape) == 1)
    text = b.choice(
        ["({} != 0)", "({} > 2)", "torch.ne({}, 0)", "({} == 3)", "(~({} == 0))", "(({} > 1) & ({} < 6))", "({} % 2 == 0)"]
    )
    text = text.replace("{}", tokens.name)
    b.emit(f"{text}.unsqueeze(-1){b.choice(_TO_FLOAT)}", shape=(*tokens.shape, 1), kind=CONSTANT)


@feature("constants")
def mask_of_truth_values(b: Builder) -> None:
    mask = b.value(BOOLEAN, lambda value: len(value.shape) == 1)
    text = b.choice(["{}[..., None]", "(~{})[..., None]", "{}.logical_not()[:, :, None]"]).format(mask.name)
    b.emit(text + b.choice(_TO_FLOAT), shape=(*mask.shape, 1), kind=CONSTANT)


@feature("constants")
def function_of_tokens(b: Builder) -> None:
    """A scale that is computed from integers."""
    tokens = b.value(INTEGER, lambda value: len(value.shape) == 1)
    text = b.choice(
        ["({} / 3)", "torch.cos({}.double())", "1 / (1 + {}.double())", "torch.exp(-{}.float())", "({}.float() - 2).tanh()"]
    )
    b.emit(f"({text.replace('{}', tokens.name)})[..., None]", shape=(*tokens.shape, 1), kind=CONSTANT)


@feature("constants")
def function_of_positions(b: Builder) -> None:
    signal = b.signal(3)
    length = signal.shape[0]
    text = b.choice(
        [
            f"torch.cos(torch.arange({length}).float())[:, None]",
            f"(torch.arange({length}) / {length})[:, None]",
            f"torch.arange({signal.name}.shape[1], dtype=torch.float64).sin().unsqueeze(-1)",
            f"torch.linspace(0, 1, {length})[:, None]",
        ]
    )
    b.emit(text, shape=(length, 1), kind=CONSTANT, batched=False)


@feature("constants")
def step_of_the_data(b: Builder) -> None:
    """A function of the data that is constant piece by piece."""
    operand = b.signal()
    text = b.choice(
        [
            "({} > 0).double()",
            "torch.sign({})",
            "({} >= 0.1).to(torch.float64)",
            "torch.round({} * 2)",
            "{}.floor()",
            "({} > {}.mean(1, keepdim=True)).double()",
            "torch.ceil({})",
            "({} < 0).double() * 0.5 + 0.5",
        ]
    )
    b.emit(text.replace("{}", operand.name), shape=operand.shape, kind=CONSTANT)


@feature("constants")
def one_hot_of_the_largest(b: Builder) -> None:
    operand = b.signal(2, 3)
    largest = f"({operand.name} + 1e-6 * torch.arange({operand.shape[-1]})).argmax(-1)"  # rounding decides no tie
    text = f"F.one_hot({largest}, {operand.shape[-1]}){b.choice(_TO_FLOAT)}"
    b.emit(text, shape=operand.shape, kind=CONSTANT)


@feature("functions_of_constants")
def constant_of_a_constant(b: Builder) -> None:
    """What is computed from a constant is one."""
    operand = b.value(CONSTANT, lambda value: True)
    text = b.choice(
        [
            "1 - {}",
            "{} * 2",
            "torch.tanh({})",
            "torch.sigmoid({})",
            "{} * {}",
            "{}.abs() + 0.1",
            "torch.exp(-{})",
            "(1.0 - {}) * -10000.0",
            "{}.clone()",
            "{}.detach()",
            "{} / ({}.abs().sum(1, keepdim=True) + 1)",
        ]
    )
    b.emit(text.replace("{}", operand.name), shape=operand.shape, kind=CONSTANT, batched=operand.batched)


def _broadcasts(small: Value, large: Value) -> bool:
    return len(small.shape) == len(large.shape) and all(a in (1, b) for a, b in zip(small.shape, large.shape, strict=True))


@feature("uses_of_constants")
def product_with_a_constant(b: Builder) -> None:
    constant = b.value(CONSTANT, lambda value: True)
    operand = b.signal(fits=lambda value: _broadcasts(constant, value))
    text = b.choice(
        [
            "{0} * {1}",
            "{1} * {0}",
            "torch.mul({0}, {1})",
            "{0}.mul({1})",
            "{0} / ({1} + 2).abs().clamp(min=0.5)",
            "{0} * {1}.expand_as({0})",
            "torch.tanh({0}) * {1}",
            "{0} * torch.sigmoid({1})",
        ]
    )
    b.emit(text.format(operand.name, constant.name), shape=operand.shape)


@feature("uses_of_constants")
def sum_with_a_constant(b: Builder) -> None:
    constant = b.value(CONSTANT, lambda value: True)
    operand = b.signal(fits=lambda value: _broadcasts(constant, value))
    text = b.choice(["{0} + {1}", "{1} - {0}", "torch.add({0}, {1}, alpha=0.5)", "{0} + 0.1 * {1}"])
    b.emit(text.format(operand.name, constant.name), shape=operand.shape)


@feature("uses_of_constants")
def masked_mean(b: Builder) -> None:
    """The mean over the positions that a mask leaves, as sentence encoders write it."""
    constant = b.value(CONSTANT, lambda value: len(value.shape) == 2 and value.shape[1] == 1)
    operand = b.signal(3, fits=lambda value: _broadcasts(constant, value))
    total = b.local()
    line = f"{total} = {constant.name}.expand({operand.name}.shape)"
    if not constant.batched:
        line = f"{total} = {constant.name}.expand_as({operand.name})"
    text = b.choice(
        [
            "({0} * {1}).sum(1) / {1}.sum(1).abs().clamp(min=1e-9)",
            "torch.sum({0} * {1}, 1) / torch.clamp({1}.abs().sum(1), min=1e-3)",
        ]
    )
    b.emit(line, text.format(operand.name, total), shape=operand.shape[1:])


@feature("uses_of_constants")
def chosen_by_a_mask(b: Builder) -> None:
    constant = b.value(CONSTANT, lambda value: True)
    operand = b.signal(fits=lambda value: _broadcasts(constant, value))
    other = b.like(operand)
    text = b.choice(
        [
            "torch.where({1} > 0.5, {0}, {2})",
            "{0}.masked_fill({1} <= 0, 0.0)",
            "torch.where({1} > 0, {0}, torch.zeros_like({0}))",
            "torch.where({1}.bool(), {0}, 0.1)",
        ]
    )
    b.emit(text.format(operand.name, constant.name, other.name), shape=operand.shape)
