"""Activations, dense layers, convolutions, batch norms and pooling."""

from ..network import INTEGER, Builder, UnfitError, Value
from .table import TOKENS, feature, spellings

# --- activations ------------------------------------------------------------------------------------------------------------

for _name, *_templates in [
    ("relu", "torch.relu({})", "F.relu({})", "{}.relu()", "<nn.ReLU()>", "F.relu(input={})", "torch.clamp({}, min=0.0)"),
    ("relu_overwriting", "F.relu({}.clone(), inplace=True)", "(2 * {}).relu_()"),
    ("gelu", "F.gelu({})", "<nn.GELU()>", "F.gelu({}, approximate='tanh')", "<nn.GELU('tanh')>"),
    ("silu", "F.silu({})", "<nn.SiLU()>", "{} * torch.sigmoid({})"),
    ("tanh", "torch.tanh({})", "{}.tanh()", "<nn.Tanh()>"),
    ("sigmoid", "torch.sigmoid({})", "{}.sigmoid()", "<nn.Sigmoid()>", "1 / (1 + torch.exp(-{}))"),
    ("leaky_relu", "F.leaky_relu({}, 0.1)", "F.leaky_relu({}, negative_slope=0.2)", "<nn.LeakyReLU(0.3)>"),
    ("elu", "F.elu({}, alpha=0.7)", "<nn.ELU()>", "F.selu({})", "F.celu({}, 0.5)"),
    ("hard", "F.hardswish({})", "F.hardtanh({}, -0.5, 0.8)", "F.relu6({})", "F.hardsigmoid({})", "{}.clamp(-0.5, max=0.5)"),
    ("smooth", "F.softplus({})", "F.softplus({}, beta=2.0)", "F.mish({})", "F.logsigmoid({})"),
    ("shrink", "F.softshrink({}, 0.1)", "F.hardshrink({}, lambd=0.1)", "F.threshold({}, 0.1, 0.2)"),
    ("softplus_of_the_negative", "F.softplus({}, beta=-1)", "F.relu(F.softplus({}, beta=-1.5))"),
    ("softsign", "F.softsign({})", "<nn.Softsign()>", "F.tanhshrink({})"),
    ("prelu", "<nn.PReLU()>"),
    ("elementwise", "{}.exp().log1p()", "torch.sin({})", "{}.abs()", "torch.abs({}).sqrt()", "torch.cos({})", "torch.erf({})"),
    ("powers", "{} ** 2", "{}.pow(3)", "torch.square({})", "torch.pow({}, exponent=2)", "({}.abs() + 0.5) ** -0.5"),
    ("power_of_a_number", "2.0 ** {}", "torch.pow(2.0, {})"),
]:  # fmt: skip
    spellings("activations", _name, *_templates)

# --- dense layers and convolutions ------------------------------------------------------------------------------------------


@feature("dense")
def linear(b: Builder) -> None:
    operand = b.signal(2, 3)
    width = b.integer(2, 6)
    bias = b.choice(["", ", bias=False"])
    out = (*operand.shape[:-1], width)
    b.emit(f"{b.layer(f'nn.Linear({operand.shape[-1]}, {width}{bias})', operand.shape, out)}({operand.name})", shape=out)


@feature("dense")
def linear_of_parameters(b: Builder) -> None:
    operand = b.signal(2, 3)
    width = b.integer(2, 6)
    weight = b.module(f"nn.Parameter(torch.randn({width}, {operand.shape[-1]}) / 2)", "weight")
    bias = b.module(f"nn.Parameter(torch.randn({width}))", "bias")
    expression = b.choice(
        [
            f"F.linear({operand.name}, {weight}, {bias})",
            f"F.linear({operand.name}, bias={bias}, weight={weight})",
            f"F.linear(input={operand.name}, weight={weight})",
            f"{operand.name} @ {weight}.t() + {bias}",
            f"torch.matmul({operand.name}, {weight}.mT)",
            f"F.linear({operand.name}, 2 * {weight}.abs())",
            f"{bias} + {operand.name} @ {weight}.T * 0.5",
            f"torch.inner({operand.name}, {weight}) - {bias}",
            f"torch.einsum('...i,oi->...o', {operand.name}, {weight}) * {bias}",
            f"torch.tensordot({operand.name}, {weight}, dims=([-1], [1])) + {bias}",
            f"({weight} @ {operand.name}.mT).mT / {bias} + {bias}",
            f"({operand.name}.unsqueeze(-2) * {weight}).sum(-1) + {bias}",
            f"F.linear({operand.name}, {weight}, {bias}) * -{bias} + 2",
            f"-({operand.name} @ ({weight} - {weight}.mean(1, keepdim=True)).T - {bias})",
            f"({operand.name}.flatten(0, -2) @ {weight}.T).view(*{operand.name}.shape[:-1], {width}) + {bias}",
            f"{operand.name} @ {weight}.T + {bias} * torch.ones_like({operand.name}[..., :1])",
            f"torch.stack([{operand.name} @ {weight}.T, {bias}.expand(*{operand.name}.shape[:-1], {width})]).sum(0)",
            f"torch.lerp({operand.name} @ {weight}.T, {bias}, 0.3)",
            f"torch.addcmul({bias}, {operand.name} @ {weight}.T, torch.ones_like({bias}))",
            f"({operand.name}.unsqueeze(-2) * {weight}).mean(-1) - {bias}",
        ]
    )
    b.emit(expression, shape=(*operand.shape[:-1], width))


def _convolution(b: Builder, operand: Value, transposed: bool = False) -> tuple[str, tuple[int, ...]]:
    """The source of a random convolution for `operand`, and the shape of its output."""
    channels, *sizes = operand.shape
    dimensions = len(sizes)
    groups = b.choice([1, 1, *[divisor for divisor in (2, 3, channels) if channels % divisor == 0]])
    width = groups * b.integer(1, max(1, 4 // groups))
    kernel, stride, padding, dilation = b.integer(1, 3), b.choice([1, 1, 2]), b.choice([0, 1]), b.choice([1, 1, 1, 2])
    settings = f"{channels}, {width}, {kernel}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
    reach = dilation * (kernel - 1)
    if transposed:
        out = [(size - 1) * stride - 2 * padding + reach + 1 for size in sizes]
    elif stride == 1 and b.chance(0.2):
        settings = settings.replace(f"padding={padding}", 'padding="same"')
        out = sizes
    else:
        out = [(size + 2 * padding - reach - 1) // stride + 1 for size in sizes]
    if min(out) < 1 or (transposed and groups > 1 and width % groups):
        raise UnfitError
    bias = b.choice(["", ", bias=False"])
    return f"nn.Conv{'Transpose' if transposed else ''}{dimensions}d({settings}{bias})", (width, *out)


@feature("convolutions")
def convolution_with_constants(b: Builder) -> None:
    """Padding before a convolution, and constants for each channel after it."""
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) > 2)
    width = b.integer(1, 4)
    scale, shift = (b.module(f"nn.Parameter(torch.randn({width}, 1, 1))", name) for name in ("scale", "shift"))
    layer = f"nn.Conv2d({operand.shape[0]}, {width}, 3)"
    plain = out = (width, *(size - 2 for size in operand.shape[1:]))
    padding = b.choice(["", "(1, 1, 1, 1)", "(1, 1)", "(1, 0, 0, 2)"])
    value = operand.name
    if padding:
        value = f"F.pad({value}, {padding})"
        amounts = [*eval(padding), 0, 0][:4]
        out = (width, operand.shape[1] - 2 + sum(amounts[2:]), operand.shape[2] - 2 + sum(amounts[:2]))
    text = b.choice(["{0} + {2}", "{0} * {1} + {2}", "{2} - {0} / ({1}.abs() + 0.5)", "({0} - {2}) * {1}", "{0} * {1}[None]"])
    call = f"{b.layer(layer, operand.shape, plain)}({value})"
    b.emit(text.format(call, scale, shift), shape=out)


@feature("convolutions")
def convolution(b: Builder) -> None:
    operand = b.signal(3, 4, 4)
    source, shape = _convolution(b, operand)
    b.emit(f"{b.layer(source, operand.shape, shape)}({operand.name})", shape=shape)


@feature("convolutions")
def transposed_convolution(b: Builder) -> None:
    operand = b.signal(3, 4)
    source, shape = _convolution(b, operand, transposed=True)
    b.emit(f"{b.layer(source, operand.shape, shape)}({operand.name})", shape=shape)


@feature("convolutions")
def convolution_of_parameters(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 3)
    channels, height, width = operand.shape
    weight = b.module(f"nn.Parameter(torch.randn(2, {channels}, 3, 3) / 3)", "weight")
    bias = b.module("nn.Parameter(torch.randn(2))", "bias")
    text, padding = b.choice(
        [
            (f"F.conv2d({operand.name}, {weight}, bias={bias})", 0),
            (f"torch.conv2d({operand.name}, {weight}, {bias}, 1, 1)", 1),
            (f"F.conv2d(input={operand.name}, weight={weight}, padding=(1, 1))", 1),
        ]
    )
    b.emit(text, shape=(2, height - 2 + 2 * padding, width - 2 + 2 * padding))


@feature("dense")
def bilinear(b: Builder) -> None:
    first = b.signal(2)
    second = b.signal(2)
    module = b.module(f"nn.Bilinear({first.shape[0]}, {second.shape[0]}, 4)")
    b.emit(f"{module}({first.name}, {second.name})", shape=(4,))


# --- batch norm -------------------------------------------------------------------------------------------------------------


def _batch_norm(b: Builder, operand_shape: tuple[int, ...]) -> str:
    settings = b.choice(["", "", "", ", affine=False", ", eps=0.1"])
    return f"nn.BatchNorm{2 if len(operand_shape) == 3 else 1}d({operand_shape[0]}{settings})"


@feature("batch_norms")
def batch_norm(b: Builder) -> None:
    operand = b.signal()
    name = b.layer(_batch_norm(b, operand.shape), operand.shape, operand.shape)
    b.emit(f"{name}({operand.name})", shape=operand.shape)


@feature("batch_norms")
def batch_norm_as_a_function(b: Builder) -> None:
    operand = b.signal()
    norm = b.module(_batch_norm(b, operand.shape).replace(", affine=False", ""), "norm")
    given = b.choice(
        [
            "{0}.running_mean, {0}.running_var, {0}.weight, {0}.bias",
            "{0}.running_mean, {0}.running_var",
            "running_var={0}.running_var, running_mean={0}.running_mean, bias={0}.bias, weight={0}.weight, eps=0.01",
        ]
    )
    b.emit(f"F.batch_norm({operand.name}, {given.format(norm)})", shape=operand.shape)


@feature("batch_norms")
def batch_norm_behind_a_layer(b: Builder) -> None:
    """A layer with its own batch norm, perhaps with pooling or a second norm in between."""
    operand = b.signal()
    lines, current = [], b.local()
    if len(operand.shape) == 1:
        shape: tuple[int, ...] = (b.integer(2, 6),)
        layer = f"nn.Linear({operand.shape[0]}, {shape[0]}{b.choice(['', ', bias=False'])})"
    else:
        layer, shape = _convolution(b, operand, transposed=b.chance(0.3))
    lines.append(f"{current} = {b.module(layer)}({operand.name})")
    if len(shape) > 1 and min(shape[1:]) >= 2 and b.chance(0.3):
        dimensions = len(shape) - 1
        pool = b.choice(["Avg", "Max"])
        lines.append(f"{current} = F.{pool.lower()}_pool{dimensions}d({current}, 2)")
        shape = (shape[0], *[size // 2 for size in shape[1:]])
    lines.append(f"{current} = {b.module(_batch_norm(b, shape), 'norm')}({current})")
    if b.chance(0.2):
        lines.append(f"{current} = {b.module(_batch_norm(b, shape), 'norm')}({current})")
    b.emit(*lines, b.choice([current, f"torch.relu({current})"]), shape=shape)


@feature("batch_norms")
def batch_norm_before_a_layer(b: Builder) -> None:
    """A batch norm that may be merged to the right, past ReLU, pooling, padding and flattening."""
    operand = b.signal(2, 4, 4)
    current, shape = b.local(), operand.shape
    lines = [f"{current} = {b.module(_batch_norm(b, shape), 'norm')}({operand.name})"]
    if b.chance(0.5):
        lines.append(f"{current} = {b.choice(['torch.relu({})', 'F.relu({})']).format(current)}")
    if len(shape) == 3 and min(shape[1:]) >= 2 and b.chance(0.4):
        pool = b.choice(
            [
                "F.avg_pool2d({}, 2)",
                "F.max_pool2d({}, 2)",
                "F.avg_pool2d({}, 2, count_include_pad=False)",
                "F.avg_pool2d({}, 2, divisor_override=3)",
            ]
        )
        lines.append(f"{current} = {pool.format(current)}")
        shape = (shape[0], *[size // 2 for size in shape[1:]])
    if len(shape) == 3 and b.chance(0.2):
        lines.append(f"{current} = F.pad({current}, (1, 0, 0, 1))")
        shape = (shape[0], *[size + 1 for size in shape[1:]])
    if len(shape) == 3 and b.chance(0.5):
        source, out = _convolution(b, Value(current, shape))
    else:
        if len(shape) == 3:
            lines.append(f"{current} = {b.choice(['{}.flatten(1)', 'torch.flatten({}, start_dim=1)']).format(current)}")
            shape = (Value(current, shape).size,)
        out = (b.integer(2, 6),)
        source = f"nn.Linear({shape[0]}, {out[0]})"
    b.emit(*lines, f"{b.module(source)}({current})", shape=out)


@feature("batch_norms")
def batch_norm_over_another_dimension(b: Builder) -> None:
    """A dense layer over the last dimension behind, or before, a batch norm over dimension 1, with sizes that seem to fit."""
    operand = b.signal(3, fits=lambda value: value.shape[1] % 2 == 0)
    channels, length = operand.shape
    norm = b.module(f"nn.BatchNorm1d({channels})", "norm")
    text = b.choice(
        [
            f"{b.module(f'nn.Linear({length}, {channels})')}({norm}({operand.name}))",
            f"{norm}({b.module(f'nn.Linear({length}, {channels})')}({operand.name}))",
            f"{b.module(f'nn.Linear({length}, {channels})')}(F.adaptive_avg_pool1d({norm}({operand.name}), {length}).relu())",
        ]
    )
    b.emit(text, shape=(channels, channels))


@feature("batch_norms")
def batch_norm_before_pooling_and_a_layer(b: Builder) -> None:
    """A dense layer over the last dimension, behind a batch norm and pooling, with as many features as channels, or twice."""
    operand = b.signal(3)
    channels = operand.shape[0]
    features = channels * b.choice([1, 2])
    norm = b.module(f"nn.BatchNorm1d({channels})", "norm")
    pool = b.choice(
        [
            f"F.adaptive_avg_pool1d({{}}, {features})",
            f"F.relu(F.adaptive_avg_pool1d({{}}, {features}))",
            f"F.adaptive_avg_pool1d(F.relu({{}}), {features})",
            f"F.adaptive_max_pool1d({{}}, {features})",
        ]
    )
    dense = b.module(f"nn.Linear({features}, 3)")
    b.emit(f"{dense}({pool.format(f'{norm}({operand.name})')})", shape=(channels, 3))


@feature("batch_norms")
def batch_norm_before_a_mean_and_a_layer(b: Builder) -> None:
    """The mean over one of two spatial dimensions leaves the other, which a dense layer reads."""
    operand = b.signal(4, fits=lambda value: value.shape[2] % value.shape[0] == 0)
    channels, _, width = operand.shape
    norm, dense = b.module(f"nn.BatchNorm2d({channels})", "norm"), b.module(f"nn.Linear({width}, 3)")
    middle = b.choice(["{}.mean((2,))", "{}.mean(2)", "F.relu({}).mean(2)"]).format(f"{norm}({operand.name})")
    b.emit(f"{dense}({middle})", shape=(channels, 3))


@feature("batch_norms")
def one_layer_with_two_batch_norms(b: Builder) -> None:
    operand = b.signal(4, 3)
    source, shape = _convolution(b, operand)
    current = b.local()
    norms = [b.module(_batch_norm(b, shape), "norm") for _ in range(2)]
    line = f"{current} = {b.module(source)}({operand.name})"
    b.emit(line, f"{norms[0]}({current}) + torch.relu({norms[1]}({current}))", shape=shape)


# --- pooling ----------------------------------------------------------------------------------------------------------------


@feature("pooling")
def pooling(b: Builder) -> None:
    operand = b.signal(3, 4, 4, fits=lambda value: min(value.shape[1:]) >= 2)
    dimensions = len(operand.shape) - 1
    kernel, stride = 2, b.choice([1, 2])
    padding = b.choice([0, 0, 1])
    sizes = [(size + 2 * padding - kernel) // stride + 1 for size in operand.shape[1:]]
    shape = (operand.shape[0], *sizes)
    kind = b.choice(["max", "avg"])
    extra = b.choice([", count_include_pad=False", ""]) if kind == "avg" else ""
    settings = f"kernel_size={kernel}, stride={stride}, padding={padding}{extra}"
    if b.chance(0.5):
        module = b.layer(f"nn.{kind.title()}Pool{dimensions}d({settings})", operand.shape, shape)
        b.emit(f"{module}({operand.name})", shape=shape)
    else:
        b.emit(f"F.{kind}_pool{dimensions}d({operand.name}, {settings})", shape=shape)


@feature("pooling")
def pooling_with_the_divisor(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 2)
    shape = (operand.shape[0], *[size // 2 for size in operand.shape[1:]])
    b.emit(f"F.avg_pool2d({operand.name}, 2, divisor_override={b.choice([3, 5])})", shape=shape)


@feature("pooling")
def adaptive_pooling(b: Builder) -> None:
    operand = b.signal(3, 4)
    dimensions, size = len(operand.shape) - 1, b.integer(1, 3)
    kind = b.choice(["avg", "max"])
    b.emit(f"F.adaptive_{kind}_pool{dimensions}d({operand.name}, {size})", shape=(operand.shape[0], *[size] * dimensions))


@feature("pooling")
def power_pooling(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 2)
    shape = (operand.shape[0], *[size // 2 for size in operand.shape[1:]])
    b.emit(f"F.lp_pool2d({operand.name}.abs() + 0.1, 2.0, 2)", shape=shape)


# --- embeddings -------------------------------------------------------------------------------------------------------------


@feature("embeddings")
def embedding(b: Builder) -> None:
    tokens = b.value(INTEGER, lambda value: len(value.shape) == 1)
    extra = b.choice(["", "", ", padding_idx=0"])
    shape = (*tokens.shape, 4)
    b.emit(f"{b.module(f'nn.Embedding({TOKENS}, 4{extra})', 'embedding')}({tokens.name})", shape=shape)


@feature("embeddings")
def embedding_with_positions(b: Builder) -> None:
    tokens = b.value(INTEGER, lambda value: len(value.shape) == 1)
    length = tokens.shape[0]
    words, places = b.module(f"nn.Embedding({TOKENS}, 4)", "embedding"), b.module(f"nn.Embedding({length}, 4)", "positions")
    text = b.choice(
        [
            f"{words}({tokens.name}) + {places}(torch.arange({length}))",
            f"{words}({tokens.name}) + {places}(torch.arange({tokens.name}.shape[1], device={tokens.name}.device))[None]",
        ]
    )
    b.emit(text, shape=(length, 4))
