"""Two values, likely of two inputs, that are encoded apart and multiplied with each other."""

from ..network import BATCH, SIGNAL, Builder, Value
from .table import expression, feature

_ENDS = ("{}", "{}", "torch.tanh({})", "torch.tanh({})", "F.normalize({}, dim=-1)", "F.normalize({}, dim=-1)", "torch.relu({})")
_ENDS += ("torch.sigmoid({})", "{} / {}.norm(dim=-1, keepdim=True)", "F.softmax({}, dim=-1)")


def _other(b: Builder, first: Value, rank: int) -> Value:
    """Another value than `first` of so many dimensions, or of any (0): often an input of its own."""

    def fits(value: Value) -> bool:
        return value.name != first.name and (not rank or len(value.shape) + 1 == rank)

    if b.chance(0.4) and sum(argument.value.kind == SIGNAL for argument in b.inputs) < 3:
        shape = tuple(b.integer(2, 5) for _ in range((rank or b.integer(2, 3)) - 1))
        value = b.argument(b.name("other"), shape, f"torch.randn({', '.join(map(str, (BATCH, *shape)))})")
        return b.value(SIGNAL, lambda one: one.name == value.name)
    return b.value(SIGNAL, fits)


def _encoded(b: Builder, value: Value, width: int, lines: list[str], flat: bool) -> Value:
    """What a dense layer and perhaps a function make of `value`, with `width` entries in the last dimension."""
    name, reads = b.local(), f"{value.name}.flatten(1)" if flat and len(value.shape) > 1 else value.name
    dense = b.module(f"nn.Linear({value.size if flat else value.shape[-1]}, {width})", "tower")
    lines.append(f"{name} = {dense}({reads})")
    end = b.choice(_ENDS).replace("{}", name)
    if end != name:
        lines.append(f"{name} = {end}")
    return Value(name, (width,) if flat else (*value.shape[:-1], width))


@feature("towers")
def two_towers(b: Builder) -> None:
    """Two vectors as a product, a similarity, or both operands of one layer."""
    first = b.signal()
    second = _other(b, first, 0)
    width, lines = b.integer(2, 5), []
    towers = [_encoded(b, value, width, lines, flat=True) for value in (first, second)]
    text = b.choice(
        [
            "{0} * {1}",
            "F.normalize({0}, dim=-1) * {1}",
            "torch.mul(torch.tanh({0}), torch.tanh({1}))",
            "F.cosine_similarity({0}, {1}, dim=-1)[:, None]",
            "F.cosine_similarity({0}, {1}).unsqueeze(1)",
            "({0} * {1}).sum(-1, keepdim=True)",
            "(F.normalize({0}, dim=1) * F.normalize({1}, dim=1)).sum(1).view(-1, 1)",
            "torch.linalg.vecdot({0}, {1})[:, None]",
            "({0}[:, None] @ {1}[:, :, None]).flatten(1)",
            "torch.bmm({0}.unsqueeze(2), {1}.unsqueeze(1))",
            "({0} @ {1}.T).diagonal()[:, None]",
            "{scale}.exp() * torch.diagonal(F.normalize({0}, dim=-1) @ F.normalize({1}, dim=-1).t())[:, None]",
            "torch.einsum('bi,bi->b', {0}, {1})[:, None]",
            "{scale}.exp() * torch.einsum('bi,bj->bij', {0}, {1})",
            "torch.einsum('bi,oij,bj->bo', {0}, {weight}, {1})",
            "F.bilinear({0}, {1}, {weight}, {bias})",
            "F.bilinear({0}, {1}, weight={weight})",
            "torch.cat([{0}, {1}, ({0} - {1}).abs(), {0} * {1}], -1)",
            "F.pairwise_distance({0}, {1}).neg().exp()[:, None]",
            "{0} * {1} / ({0}.norm(dim=-1, keepdim=True) * {1}.norm(dim=-1, keepdim=True) + 1e-3)",
        ]
    )
    expression(b, text, *towers, lines=lines, scale=(), weight=(3, width, width), bias=(3,))


@feature("towers")
def two_sequences(b: Builder) -> None:
    """The positions of one sequence with those of another."""
    first = b.signal(3)
    second = _other(b, first, 3)
    width, lines = b.integer(2, 4), []
    towers = [_encoded(b, value, width, lines, flat=False) for value in (first, second)]
    text = b.choice(
        [
            "{0} @ {1}.mT",
            "torch.einsum('bid,bjd->bij', {0}, {1})",
            "torch.einsum('bid,bjd->b', {0}, {1})[:, None]",
            "torch.einsum('bid,bje->bde', {0}, {1})",
            "torch.einsum('bid,bjd->bij', F.normalize({0}, dim=-1), F.normalize({1}, dim=-1)).amax(-1)",
            "torch.softmax({0} @ {1}.mT, -1) @ {1}",
            "F.scaled_dot_product_attention({0}, {1}, {1})",
            "F.cosine_similarity({0}[:, :, None], {1}[:, None], dim=-1)",
            "({0}[:, :, None] * {1}[:, None]).sum(-1)",
            "{0} * {1}.mean(1, keepdim=True)",
            "F.normalize({0}.mean(1), dim=-1) * {1}.amax(1)",
            "torch.matmul({0}, {1}.transpose(1, 2)).tanh()",
            "{0}.sum(1) * {1}.sum(1)",
        ]
    )
    expression(b, text, *towers, lines=lines)
