"""Reductions, sums, products, gates, norms and softmax."""

from collections.abc import Sequence

from ..network import Builder
from .table import feature, spellings

# --- reductions -------------------------------------------------------------------------------------------------------------


def _reduction(b: Builder, functions: Sequence[str], dim: str, keepdim: str) -> None:
    operand = b.signal(3, 4)
    place = b.integer(1, len(operand.shape))
    kept = b.chance(0.5)
    function = b.choice(functions)
    shown = b.choice([place, place - len(operand.shape) - 1])
    text = b.choice(
        [
            f"{operand.name}.{function}({dim}={shown}{f', {keepdim}=True' if kept else ''})",
            f"torch.{function}({operand.name}, {dim}={shown}{f', {keepdim}=True' if kept else ''})",
            f"torch.{function}(input={operand.name}, {dim}={shown}, {keepdim}={kept})",
        ]
        + ([f"{operand.name}.{function}({shown}{', True' if kept else ''})"] if dim == "dim" else [])
    )
    rest = [size for number, size in enumerate(operand.shape, 1) if number != place or kept]
    if kept:
        rest[place - 1] = 1
    b.emit(text, shape=rest)


@feature("reductions")
def reduction(b: Builder) -> None:
    _reduction(b, ["mean", "sum", "amax", "amin"], "dim", "keepdim")


@feature("reductions")
def reduction_with_the_keywords_of_numpy(b: Builder) -> None:
    _reduction(b, ["mean", "sum"], "axis", "keepdims")


@feature("reductions")
def mean_over_several(b: Builder) -> None:
    operand = b.signal(4)
    expression = b.choice(
        [
            "{}.mean((2, 3))",
            "torch.mean({}, dim=(2, 3))",
            "{}.mean([-2, -1])",
            "{}.sum((2, 3))",
            "{}.flatten(2).mean(-1)",
            "F.adaptive_avg_pool2d({}, 1).flatten(1)",
            "{}.amax((2, 3))",
        ]
    )
    b.emit(expression.format(operand.name), shape=operand.shape[:1])


@feature("reductions")
def selected_reduction(b: Builder) -> None:
    """Results with names or places: values of max, sort, topk."""
    operand = b.signal(3)
    text, shape = b.choice(
        [
            (f"{operand.name}.max(dim=1)[0]", operand.shape[1:]),
            (f"torch.min({operand.name}, 2)[0]", operand.shape[:1]),
            (f"{operand.name}.topk(1, dim=-1)[0]", (operand.shape[0], 1)),
            (f"{operand.name}.sort(dim=-1)[0]", operand.shape),
        ]
    )
    b.emit(text, shape=shape)


@feature("reductions")
def named_results(b: Builder) -> None:
    operand = b.signal(3)
    text, shape = b.choice(
        [
            (f"{operand.name}.max(dim=1).values", operand.shape[1:]),
            (f"torch.min({operand.name}, 2).values", operand.shape[:1]),
            (f"{operand.name}.topk(1, dim=-1).values", (operand.shape[0], 1)),
            (f"torch.sort({operand.name}).values", operand.shape),
        ]
    )
    b.emit(text, shape=shape)


@feature("reductions")
def further_reductions(b: Builder) -> None:
    operand = b.signal(3)
    text = b.choice(["torch.logsumexp({}, 1)", "{}.logsumexp(dim=1)", "{}.prod(dim=1)", "{}.median(dim=1)[0]"])
    b.emit(text.format(operand.name), shape=operand.shape[1:])


@feature("statistics")
def statistic(b: Builder) -> None:
    operand = b.signal(3, fits=lambda value: value.shape[1] > 1)
    text = b.choice(
        [
            "{}.std(-1)",
            "{}.var(dim=-1)",
            "torch.var({}, dim=2, unbiased=False)",
            "torch.std({}, -1, correction=0)",
            "{}.norm(dim=-1)",
            "torch.linalg.vector_norm({}, dim=2)",
        ]
    )
    b.emit(text.format(operand.name), shape=operand.shape[:1])


# --- sums and products ------------------------------------------------------------------------------------------------------


@feature("sums")
def addition(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        [
            "{0} + {1}",
            "{0} - {1}",
            "torch.add({0}, {1})",
            "{0}.add({1}, alpha=0.5)",
            "torch.sub({0}, other={1})",
            "torch.add({0}, {1}, alpha=-2)",
            "{0}.sub({1})",
            "torch.lerp({0}, {1}, 0.3)",
            "sum([{0}, {1}, {0}])",
            "torch.stack([{0}, {1}]).sum(0)",
            "torch.add(input={0}, other={1})",
        ]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


@feature("sums")
def residual(b: Builder) -> None:
    """x + f(x)."""
    operand = b.signal()
    inner = b.choice(["torch.relu({})", "torch.tanh(0.5 * {})", "F.gelu({})", "F.silu({})"])
    if len(operand.shape) < 3:
        inner = inner.format(f"{b.module(f'nn.Linear({operand.shape[-1]}, {operand.shape[-1]})')}({{}})")
    b.emit(f"{operand.name} + {inner.format(operand.name)}", shape=operand.shape)


@feature("sums")
def broadcast_sum(b: Builder) -> None:
    """The smaller of two terms is repeated."""
    first = b.signal(3, 4)
    second = b.signal(fits=lambda value: value.shape == first.shape[:1] or value.shape == first.shape[1:])
    missing = "[:, :" + ", None" * (len(first.shape) - 1) + "]" if second.shape == first.shape[:1] else "[:, None]"
    b.emit(b.choice([f"{first.name} + {second.name}{missing}", f"{second.name}{missing} - {first.name}"]), shape=first.shape)


@feature("sums")
def sum_with_numbers_and_parameters(b: Builder) -> None:
    operand = b.signal()
    parameter = b.module(f"nn.Parameter(torch.randn({', '.join(map(str, operand.shape))}))", "offset")
    text = b.choice(
        [
            "{0} + {1}",
            "{1} - {0}",
            "{0} + 0.5",
            "1 - {0}",
            "{0} - 2",
            "{0}.add({1})",
            "torch.add({1}, {0})",
            "torch.rsub({0}, 1.0)",
            "torch.add({0}, 1, alpha=2)",
        ]
    )
    b.emit(text.format(operand.name, parameter), shape=operand.shape)


@feature("sums")
def cumulative(b: Builder) -> None:
    operand = b.signal(3)
    b.emit(b.choice(["{}.cumsum(1)", "torch.cumsum({}, dim=-1)"]).format(operand.name), shape=operand.shape)


@feature("products")
def product(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        ["{0} * {1}", "torch.mul({0}, {1})", "{0}.mul({1})", "0.5 * {0} * {1}", "torch.addcmul({0}, {0}, {1}, value=0.5)"]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


@feature("products")
def product_as_multiply(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        ["torch.multiply({0}, other={1})", "{0}.multiply({1})", "torch.divide({0}, {1}.abs() + 1)", "torch.subtract({0}, {1})"]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


@feature("products")
def product_with_numbers_and_parameters(b: Builder) -> None:
    operand = b.signal()
    parameter = b.module(f"nn.Parameter(torch.randn({', '.join(map(str, operand.shape))}))", "scale")
    number = b.number()
    text = b.choice(
        [
            f"{{0}} * {number}",
            f"{number} * {{0}}",
            f"{{0}} / {number}",
            "{0} * {1}",
            "{1} * {0}",
            "-{0}",
            "{0} / ({1}.abs() + 1)",
            "torch.mul({0}, {1})",
            "{0}.div(2)",
            "torch.div({0}, other=3.0)",
            "torch.neg({0})",
        ]
    )
    b.emit(text.format(operand.name, parameter), shape=operand.shape)


@feature("gates")
def gate(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        [
            "{0} * torch.sigmoid({1})",
            "torch.sigmoid({1}) * {0}",
            "{0} * F.hardsigmoid({1})",
            "torch.tanh({1}) * {0}",
            "{0}.mul({1}.sigmoid())",
            "{0} * (0.5 * (1 + torch.tanh({1})))",
            "F.relu6({1} + 3) / 6 * {0}",
            "{0} * {1}.clamp(0, 1)",
        ]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


@feature("gates")
def quotient(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        [
            "{0} / (1 + {1}.abs())",
            "torch.div({0}, {1}.abs() + 0.5)",
            "1 / (1 + {1} * {1}) * {0}",
            "{0} * torch.rsqrt({1} ** 2 + 1)",
        ]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


@feature("gates")
def squeeze_and_excitation(b: Builder) -> None:
    operand = b.signal(4)
    channels = operand.shape[0]
    dense = b.module(f"nn.Linear({channels}, {channels})")
    scale = b.local()
    line = f"{scale} = torch.sigmoid({dense}({operand.name}.mean((2, 3))))"
    text = b.choice(
        [
            "{0} * {1}[:, :, None, None]",
            "{1}.unsqueeze(-1).unsqueeze(-1) * {0}",
            "{0} * {1}.view({0}.shape[0], -1, 1, 1)",
            "{0} * {1}[..., None, None].expand_as({0})",
        ]
    )
    b.emit(line, text.format(operand.name, scale), shape=operand.shape)


@feature("gates")
def gated_linear_unit(b: Builder) -> None:
    operand = b.signal(2, 3, fits=lambda value: value.shape[-1] % 2 == 0)
    half = (*operand.shape[:-1], operand.shape[-1] // 2)
    first, second = b.local(), b.local()
    if b.chance(0.5):
        b.emit(f"F.glu({operand.name}{b.choice(['', ', dim=-1', ', -1'])})", shape=half)
    else:
        split = f"{first}, {second} = {b.choice([f'{operand.name}.chunk(2, dim=-1)', f'torch.chunk({operand.name}, 2, -1)'])}"
        b.emit(split, f"{first} * F.{b.choice(['silu', 'gelu'])}({second})", shape=half)


# --- norms and softmax ------------------------------------------------------------------------------------------------------


@feature("norms")
def layer_norm(b: Builder) -> None:
    operand = b.signal(2, 3, fits=lambda value: value.shape[-1] > 1)
    width = operand.shape[-1]
    norm = b.layer(
        f"nn.LayerNorm({width}{b.choice(['', '', ', elementwise_affine=False', ', eps=0.1'])})", operand.shape, operand.shape
    )
    if b.chance(0.7):
        b.emit(f"{norm}({operand.name})", shape=operand.shape)
    else:
        norm = b.module(f"nn.LayerNorm({width})", "norm")
        text = b.choice(
            [
                "F.layer_norm({0}, ({2},), {1}.weight, {1}.bias)",
                "F.layer_norm({0}, [{2}])",
                "F.layer_norm(input={0}, normalized_shape=({2},), bias={1}.bias, weight={1}.weight)",
            ]
        )
        b.emit(text.format(operand.name, norm, width), shape=operand.shape)


@feature("norms")
def other_norms(b: Builder) -> None:
    operand = b.signal(3, 4, fits=lambda value: value.size // value.shape[0] > 1)
    channels, dimensions = operand.shape[0], len(operand.shape) - 1
    groups = 2 if channels % 2 == 0 else 1
    source = b.choice(
        [
            f"nn.GroupNorm({groups}, {channels})",
            f"nn.InstanceNorm{dimensions}d({channels})",
            f"nn.RMSNorm({operand.shape[-1]})",
            f"nn.InstanceNorm{dimensions}d({channels}, affine=True)",
        ]
    )
    b.emit(f"{b.layer(source, operand.shape, operand.shape)}({operand.name})", shape=operand.shape)


@feature("norms")
def normalized(b: Builder) -> None:
    operand = b.signal(2, 3)
    text = b.choice(["F.normalize({}, dim=-1)", "F.normalize({}, p=2.0, dim=1)", "F.normalize({})"])
    b.emit(text.format(operand.name), shape=operand.shape)


@feature("norms")
def local_response_norm(b: Builder) -> None:
    operand = b.signal(4)
    b.emit(f"F.local_response_norm({operand.name}, 2, alpha=0.1)", shape=operand.shape)


@feature("norms")
def written_norm(b: Builder) -> None:
    """A norm as arithmetic, as language models write it."""
    operand = b.signal(2, 3, fits=lambda value: value.shape[-1] > 1)
    squares = b.local()
    weight = b.module(f"nn.Parameter(torch.rand({operand.shape[-1]}) + 0.5)", "weight")
    line = f"{squares} = {operand.name}.pow(2).mean(-1, keepdim=True)"
    b.emit(line, f"{weight} * ({operand.name} * torch.rsqrt({squares} + 1e-2))", shape=operand.shape)


@feature("norms")
def written_layer_norm(b: Builder) -> None:
    operand = b.signal(2, 3, fits=lambda value: value.shape[-1] > 1)
    centred = b.local()
    text = b.choice(
        [
            "{1} / torch.sqrt({1}.pow(2).mean(-1, keepdim=True) + 0.01)",
            "{1} / ({0}.var(-1, keepdim=True, unbiased=False) + 0.01).sqrt()",
            "{1} / ({0}.std(-1, keepdim=True) + 0.1)",
        ]
    )
    line = f"{centred} = {operand.name} - {operand.name}.mean(-1, keepdim=True)"
    b.emit(line, text.format(operand.name, centred), shape=operand.shape)


spellings(
    "softmax",
    "softmax",
    "torch.softmax({}, -1)",
    "F.softmax({}, dim=1)",
    "{}.softmax(dim=-1)",
    "<nn.Softmax(dim=1)>",
    "torch.softmax(input={}, dim=1)",
)
spellings("softmax", "softmax_without_a_dimension", "<nn.Softmax()>", "F.softmax({})", ranks=(2, 4))
spellings("softmax", "log_softmax", "torch.log_softmax({}, -1)", "F.log_softmax({}, dim=1)", "<nn.LogSoftmax(dim=1)>")
spellings("softmax", "softmax_of_the_negative", "F.softmin({}, dim=1)", "<nn.Softmin(dim=1)>")


@feature("softmax")
def written_softmax(b: Builder) -> None:
    """A softmax as arithmetic: shifted, masked, stabilized, and weighing before its division."""
    operand = b.signal(2, 3, 4)
    dim = b.integer(1, len(operand.shape))
    shown = b.choice([dim, dim - len(operand.shape) - 1])
    shift = b.choice(["", " - {0}.amax({1}, keepdim=True)", " - {0}.detach().amax({1}, keepdim=True)", " / 0.7"])
    weights = b.local()
    line = f"{weights} = torch.exp({operand.name}{shift.format(operand.name, shown)})"
    hidden = f"{operand.name} < {operand.name}.amax({shown}, keepdim=True) - 1.5"  # never all of them
    mask = b.choice(["", "", f".masked_fill({hidden}, 0.0)"])
    text = b.choice(
        [
            "{0} / {0}.sum({1}, keepdim=True)",
            "{0} / {0}.sum({1}).unsqueeze({1})",
            "{0} * {0}.sum({1}, keepdim=True).reciprocal()",
            "{0} / ({0}.sum({1}, keepdim=True) + 1e-6)",
            "{0} / {0}.sum({1}, keepdim=True).clamp(min=1e-3)",
            "F.normalize({0}, p=1, dim={1})",
        ]
    )
    b.emit(line + mask, text.format(weights, shown), shape=operand.shape)


@feature("softmax")
def weighted_part_by_part(b: Builder) -> None:
    """Weighted values, added by a loop or by index_add, or averaged."""
    operand = b.signal(3)
    weights, length = b.local(), operand.shape[0]
    line = f"{weights} = torch.softmax({operand.name} @ {operand.name}.mT, -1)"
    text = b.choice(
        [
            "sum({1}[..., part, None] * {0}[:, part, None] for part in range({2}))",
            "({1}[..., None] * {0}[:, None]).mean(2)",
            "torch.zeros_like({0}).index_add(1, torch.tensor([0] * {2}), {1}[..., :1] * {0})",
            "torch.stack([{0}, {1}[..., :1].expand_as({0})]).prod(0)",
            "torch.diag_embed({1}[..., 0]) @ {0}",
            "{0} * {1}[..., :1] * torch.sigmoid({1}[..., :1])",
        ]
    )
    b.emit(line, text.format(operand.name, weights, length), shape=operand.shape)


@feature("softmax")
def written_weighted_mean(b: Builder) -> None:
    """Values that exponentials weigh, divided by the sum of these."""
    operand = b.signal(3)
    weights = b.local()
    of_scores = ("({0} @ {0}.mT).exp()", "({1} @ {0}) / {1}.sum(-1, keepdim=True)", operand.shape)
    pooled = ("(2 * {0}[..., :1]).exp()", "({1} * {0}).sum(1) / {1}.sum(1)", operand.shape[1:])
    exponentials, text, rest = b.choice([of_scores, pooled])
    line = f"{weights} = {exponentials.format(operand.name)}"
    b.emit(line, text.format(operand.name, weights), shape=rest)
