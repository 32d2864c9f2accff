"""Attention in its spellings, recurrence, and modules of modules."""

from ..network import SIGNAL, Builder, UnfitError
from .table import feature

# --- attention --------------------------------------------------------------------------------------------------------------


@feature("attention")
def attention(b: Builder) -> None:
    """Scaled dot-product attention in one of its spellings."""
    operand = b.signal(3)
    length, width = operand.shape
    source = b.like(operand) if b.chance(0.3) else operand
    query, key, value, scores = (b.local() for _ in range(4))
    lines = [
        f"{name} = {b.module(f'nn.Linear({width}, 4)')}({read.name})"
        for name, read in ((query, operand), (key, source), (value, source))
    ]
    if b.chance(0.4):
        mask = b.module(f"nn.Buffer(torch.ones({length}, {length}).tril().bool())", "mask")
        extra = b.choice(["", ", is_causal=True", f", attn_mask={mask}", ", scale=0.3"])
        b.emit(*lines, f"F.scaled_dot_product_attention({query}, {key}, {value}{extra})", shape=(length, 4))
        return
    product = b.choice(
        [
            "{0} @ {1}.mT",
            "torch.bmm({0}, {1}.transpose(1, 2))",
            "torch.matmul({0}, {1}.transpose(-1, -2))",
            "torch.einsum('bqd,bkd->bqk', {0}, {1})",
            "{0}.matmul({1}.permute(0, 2, 1))",
        ]
    )
    lines.append(f"{scores} = {product.format(query, key)} {b.choice(['/ 2', '* 0.5', '/ 4 ** 0.5'])}")
    if b.chance(0.3):
        mask = b.module(f"nn.Buffer(torch.ones({length}, {length}).tril())", "mask")
        masked = b.choice(
            [
                "{0}.masked_fill({1} == 0, float('-inf'))",
                "torch.where({1} > 0, {0}, torch.full_like({0}, -1e9))",
                "{0}.masked_fill(~{1}.bool(), -1e9)",
            ]
        )
        lines.append(f"{scores} = {masked.format(scores, mask)}")
    lines.append(f"{scores} = {b.choice(['torch.softmax({}, -1)', 'F.softmax({}, dim=-1)', '{}.softmax(-1)']).format(scores)}")
    text = b.choice(
        ["{0} @ {1}", "torch.bmm({0}, {1})", "torch.einsum('bqk,bkd->bqd', {0}, {1})", "torch.einsum('bij,bjc->bic', {0}, {1})"]
    )
    b.emit(*lines, text.format(scores, value), shape=(length, 4))


@feature("attention")
def heads(b: Builder) -> None:
    """Attention with two heads, and queries, keys and values of one layer."""
    operand = b.signal(3)
    length, width = operand.shape
    joint, query, key, value, mixed = (b.local() for _ in range(5))
    dense, back = b.module(f"nn.Linear({width}, 12)"), b.module(f"nn.Linear(4, {width})")
    split = b.choice(
        [
            f"{joint} = {dense}({operand.name}).view({operand.name}.shape[0], {length}, 3, 2, 2).permute(2, 0, 3, 1, 4)",
            f"{joint} = {dense}({operand.name}).reshape(-1, {length}, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)",
            f"{joint} = [part.unflatten(-1, (2, 2)).transpose(1, 2) for part in {dense}({operand.name}).chunk(3, dim=-1)]",
        ]
    )
    b.emit(
        split,
        f"{query}, {key}, {value} = {joint}[0], {joint}[1], {joint}[2]",
        f"{mixed} = ({query} @ {key}.transpose(-2, -1) * 0.7).softmax(dim=-1) @ {value}",
        f"{back}({mixed}.transpose(1, 2).reshape(-1, {length}, 4))",
        shape=operand.shape,
    )


@feature("attention")
def attention_modules(b: Builder) -> None:
    operand = b.signal(3, fits=lambda value: value.shape[1] % 2 == 0)
    width = operand.shape[1]
    if b.chance(0.6):
        module = b.module(f"nn.MultiheadAttention({width}, 2, batch_first=True)", "attention")
        other = b.like(operand).name if b.chance(0.3) else operand.name
        extra = b.choice(["", ", need_weights=False"])
        b.emit(f"{module}({operand.name}, {other}, {other}{extra})[0]", shape=operand.shape)
    else:
        extra = b.choice(["", ", norm_first=True", ", activation='gelu'"])
        module = b.module(f"nn.TransformerEncoderLayer({width}, 2, 8, batch_first=True{extra})", "encoder")
        b.emit(f"{module}({operand.name})", shape=operand.shape)


@feature("attention")
def pairwise(b: Builder) -> None:
    """Products over pairs, as einsum or matmul."""
    first = b.signal(3)
    second = b.signal(3, fits=lambda value: value.shape[1] == first.shape[1])
    text = b.choice(
        ["{0} @ {1}.mT / 3", "torch.einsum('bid,bjd->bij', {0}, {1}) * 0.3", "torch.matmul({0}, {1}.transpose(1, 2)) / 3"]
    )
    b.emit(text.format(first.name, second.name), shape=(first.shape[0], second.shape[0]))


@feature("attention")
def similarity(b: Builder) -> None:
    first = b.signal(3)
    second = b.like(first)
    b.emit(f"F.cosine_similarity({first.name}, {second.name}, dim=-1)", shape=first.shape[:1])


@feature("attention")
def further_products(b: Builder) -> None:
    first = b.signal(2)
    second = b.signal(2, fits=lambda value: value.shape == first.shape)
    text, shape = b.choice(
        [
            ("torch.linalg.matmul({0}[:, :, None], {1}[:, None])", first.shape * 2),
            ("F.pairwise_distance({0}, {1}, keepdim=True)", (1,)),
        ]
    )
    b.emit(text.format(first.name, second.name), shape=shape)


# --- recurrence -------------------------------------------------------------------------------------------------------------


@feature("recurrent")
def recurrence(b: Builder) -> None:
    """A recurrent network as a loop in Python."""
    operand = b.signal(3)
    length, width = operand.shape
    inner, back = b.module(f"nn.Linear({width}, 4)"), b.module("nn.Linear(4, 4, bias=False)")
    state, states, step = b.local(), b.local(), b.local()
    lines = [
        f"{state} = {b.choice([f'torch.zeros({operand.name}.shape[0], 4)', f'torch.tanh({inner}({operand.name}[:, 0]))'])}"
    ]
    lines.append(f"{states} = []")
    lines.append(f"for {step} in range({length}):")
    if b.chance(0.5):
        lines.append(f"    {state} = torch.tanh({inner}({operand.name}[:, {step}]) + {back}({state}))")
    else:
        gate, update = b.module(f"nn.Linear({width}, 4)"), b.local()
        lines.append(f"    {update} = torch.sigmoid({gate}({operand.name}[:, {step}]))")
        new = f"torch.tanh({inner}({operand.name}[:, {step}]) + {back}({state}))"
        lines.append(f"    {state} = {update} * {state} + (1 - {update}) * {new}")
    lines.append(f"    {states}.append({state})")
    if b.chance(0.5):
        b.emit(*lines, state, shape=(4,))
    else:
        b.emit(*lines, f"torch.stack({states}, dim=1)", shape=(length, 4))


# --- modules of modules, and modules called again ---------------------------------------------------------------------------


@feature("blocks")
def sequence_of_modules(b: Builder) -> None:
    operand = b.signal(2, 3)
    width, hidden = operand.shape[-1], b.integer(2, 6)
    activation = b.choice(["nn.ReLU()", "nn.GELU()", "nn.ReLU(inplace=True)", "nn.Tanh()"])
    source = f"nn.Sequential(nn.Linear({width}, {hidden}), {activation}, nn.Dropout(), nn.Linear({hidden}, {width}))"
    name = b.layer(source, operand.shape, operand.shape)
    b.emit(b.choice([f"{name}({operand.name})", f"{operand.name} + {name}({operand.name})"]), shape=operand.shape)


@feature("blocks")
def sliced_sequence(b: Builder) -> None:
    operand = b.signal(2, 3)
    width = operand.shape[-1]
    name = b.module(f"nn.Sequential(nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU())")
    b.emit(f"{name}[2:]({name}[:2]({operand.name}))", shape=operand.shape)


@feature("blocks")
def list_of_modules(b: Builder) -> None:
    operand = b.signal(2, 3)
    width, layer, current = operand.shape[-1], b.local(), b.local()
    name = b.module(f"nn.ModuleList([nn.Linear({width}, {width}) for _ in range(2)])", "layers")
    lines = [f"{current} = {operand.name}", f"for {layer} in {name}:"]
    lines.append(
        b.choice([f"    {current} = torch.relu({layer}({current}))", f"    {current} = {current} + {layer}({current})"])
    )
    b.emit(*lines, current, shape=operand.shape)


@feature("blocks")
def convolutional_block(b: Builder) -> None:
    operand = b.signal(4)
    channels = operand.shape[0]
    conv = f"nn.Conv2d({channels}, {channels}, 3, padding=1, bias=False)"
    name = b.layer(
        f"nn.Sequential({conv}, nn.BatchNorm2d({channels}), nn.ReLU(inplace=True), {conv}, nn.BatchNorm2d({channels}))",
        operand.shape,
        operand.shape,
    )
    b.emit(b.choice([f"torch.relu({name}({operand.name}) + {operand.name})", f"{name}({operand.name})"]), shape=operand.shape)


@feature("parametrizations")
def parametrized(b: Builder) -> None:
    operand = b.signal(2, 3)
    width = operand.shape[-1]
    wrap = b.choice(["torch.nn.utils.parametrizations.weight_norm", "torch.nn.utils.parametrizations.spectral_norm"])
    b.emit(f"{b.module(f'{wrap}(nn.Linear({width}, 4))')}({operand.name})", shape=(*operand.shape[:-1], 4))


@feature("shared")
def called_again(b: Builder) -> None:
    """A module that another step called, on another value or the same one."""
    known = [(layer, value) for layer in b.layers for value in b.values if value.kind == SIGNAL and value.shape == layer[2]]
    if not known:
        raise UnfitError
    (name, source, _, shape), value = b.choice(known)
    operand = b.value(SIGNAL, lambda other: other.name == value.name)
    b.emit(f"{b.shared(name, source)}({operand.name})", shape=shape)


@feature("shared")
def twice_the_same(b: Builder) -> None:
    """One value as both operands."""
    operand = b.signal()
    text = b.choice(["{0} + {0}", "{0} * {0}", "torch.cat([{0}, {0}], 1)[:, :{1}]", "{0} - 0.5 * {0}"])
    b.emit(text.format(operand.name, operand.shape[0]), shape=operand.shape)
