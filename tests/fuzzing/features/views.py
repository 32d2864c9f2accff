"""Values that are taken apart, put together, moved and overwritten."""

from ..network import Builder
from .table import feature

# --- views, and values that are taken apart and put together ----------------------------------------------------------------


@feature("views")
def reshaped(b: Builder) -> None:
    operand = b.signal()
    options: list[tuple[str, tuple[int, ...]]] = [(f"{operand.name}.flatten(1)", (operand.size,))]
    if len(operand.shape) == 1:
        halves = next((size for size in (2, 3) if operand.size % size == 0), 1)
        parts = (halves, operand.size // halves)
        options = [
            (f"{operand.name}.reshape(-1, {parts[0]}, {parts[1]})", parts),
            (f"{operand.name}.unsqueeze(1)", (1, operand.size)),
            (f"{operand.name}.view({operand.name}.shape[0], {parts[0]}, -1)", parts),
            (f"{operand.name}.unflatten(1, ({parts[0]}, {parts[1]}))", parts),
            (f"{operand.name}[:, :, None]", (operand.size, 1)),
        ]
    if len(operand.shape) == 2:
        turned = (operand.shape[1], operand.shape[0])
        options += [
            (f"{operand.name}.transpose(1, 2)", turned),
            (f"{operand.name}.permute(0, 2, 1)", turned),
            (f"{operand.name}.mT", turned),
            (f"{operand.name}.reshape({operand.name}.size(0), {turned[0]}, -1)", turned),
            (f"torch.permute({operand.name}, dims=(0, 2, 1))", turned),
            (f"{operand.name}.unsqueeze(1)", (1, *operand.shape)),
            (f"torch.transpose({operand.name}, dim0=1, dim1=2)", turned),
            (f"torch.flatten({operand.name}, start_dim=1)", (operand.size,)),
        ]
    if len(operand.shape) == 3:
        channels, height, width = operand.shape
        options += [
            (f"{operand.name}.flatten(2)", (channels, height * width)),
            (f"{operand.name}.flatten(2).mT", (height * width, channels)),
            (f"{operand.name}.permute(0, 2, 3, 1)", (height, width, channels)),
            (f"{operand.name}.movedim(1, -1)", (height, width, channels)),
            (f"torch.flatten({operand.name}, 1)", (operand.size,)),
        ]
    text, shape = b.choice(options)
    b.emit(text, shape=shape)


@feature("views")
def slices(b: Builder) -> None:
    operand = b.signal(fits=lambda value: value.shape[0] >= 2)
    first, rest = operand.shape[0], operand.shape[1:]
    cut = b.integer(1, first - 1)
    options = [
        (f"{operand.name}[:, :{cut}]", (cut, *rest)),
        (f"{operand.name}[:, {cut}:]", (first - cut, *rest)),
        (f"{operand.name}[:, ::2]", ((first + 1) // 2, *rest)),
        (f"{operand.name}.narrow(1, {cut - 1}, 1)", (1, *rest)),
        (f"torch.split({operand.name}, [{cut}, {first - cut}], dim=1)[1]", (first - cut, *rest)),
        (f"{operand.name}.chunk({first}, 1)[0]", (1, *rest)),
        (f"{operand.name}[:, [0, {cut}]]", (2, *rest)),
        (f"torch.index_select({operand.name}, 1, torch.tensor([{cut}, 0, {cut}]))", (3, *rest)),
    ]
    if rest:
        options += [
            (f"{operand.name}[:, {cut}]", rest),
            (f"{operand.name}.select(1, 0)", rest),
            (f"{operand.name}[:, -1]", rest),
            (f"{operand.name}[..., 0]", operand.shape[:-1]),
            (f"{operand.name}.unbind(1)[{cut}]", rest),
        ]
    text, shape = b.choice(options)
    b.emit(text, shape=shape)


@feature("views")
def moved(b: Builder) -> None:
    """Values in another order, repeated or padded."""
    operand = b.signal()
    last = operand.shape[-1]
    options = [
        (f"{operand.name}.flip(-1)", last),
        (f"torch.flip({operand.name}, dims=(-1,))", last),
        (f"{operand.name}.roll(1, -1)", last),
        (f"torch.roll({operand.name}, shifts=1, dims=1)", last),
        (f"torch.repeat_interleave({operand.name}, 2, -1)", 2 * last),
        (f"F.pad({operand.name}, (1, 1))", last + 2),
        (f"F.pad({operand.name}, (0, 2), value=0.3)", last + 2),
        (f"F.pad(input={operand.name}, pad=(1, 0))", last + 1),
        (f"{operand.name}.clone()", last),
        (f"{operand.name}.contiguous()", last),
        (f"torch.cat(torch.tensor_split({operand.name}, 2, -1)[::-1], -1)", last),
        (f"{operand.name}.repeat(1, {', '.join(['1'] * (len(operand.shape) - 1) + ['2'])})", 2 * last),
    ]
    text, size = b.choice(options)
    b.emit(text, shape=(*operand.shape[:-1], size))


@feature("views")
def resized(b: Builder) -> None:
    operand = b.signal(4)
    channels, height, width = operand.shape
    text = b.choice(
        [
            "F.interpolate({}, scale_factor=2)",
            "F.interpolate({}, scale_factor=2.0, mode='bilinear')",
            "F.interpolate({}, size=({}, {}))",
            "F.interpolate({}, scale_factor=2, mode='bilinear', align_corners=True)",
        ]
    )
    b.emit(text.format(operand.name, 2 * height, 2 * width), shape=(channels, 2 * height, 2 * width))


@feature("views")
def shuffled(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: value.shape[0] % 4 == 0 or (value.shape[1] % 2 == 0 and value.shape[2] % 2 == 0))
    channels, height, width = operand.shape
    if channels % 4 == 0:
        b.emit(f"F.pixel_shuffle({operand.name}, 2)", shape=(channels // 4, 2 * height, 2 * width))
    else:
        b.emit(f"F.pixel_unshuffle({operand.name}, 2)", shape=(4 * channels, height // 2, width // 2))


@feature("views")
def dropped_out(b: Builder) -> None:
    operand = b.signal()
    source = b.choice(["nn.Dropout()", "nn.Dropout(0.2)", "nn.Identity()"])
    b.emit(f"{b.layer(source, operand.shape, operand.shape)}({operand.name})", shape=operand.shape)


@feature("views")
def channels_dropped_out(b: Builder) -> None:
    operand = b.signal(4)
    b.emit(f"{b.module(b.choice(['nn.Dropout2d()', 'nn.AlphaDropout()']))}({operand.name})", shape=operand.shape)


@feature("joins")
def concatenation(b: Builder) -> None:
    first = b.signal()
    second = b.signal(fits=lambda value: len(value.shape) == len(first.shape) and value.shape[1:] == first.shape[1:])
    text = b.choice(["torch.cat([{0}, {1}], 1)", "torch.cat(({1}, {0}), dim=1)", "torch.cat(tensors=[{0}, {1}], dim=1)"])
    b.emit(text.format(first.name, second.name), shape=(first.shape[0] + second.shape[0], *first.shape[1:]))


@feature("joins")
def concatenation_as_concat(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(["torch.concat([{0}, {1}], dim=1)", "torch.concatenate([{0}, {1}], 1)"])
    b.emit(text.format(first.name, second.name), shape=(2 * first.shape[0], *first.shape[1:]))


@feature("joins")
def concatenation_along_the_axis(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    b.emit(f"torch.cat([{first.name}, {second.name}], axis=1)", shape=(2 * first.shape[0], *first.shape[1:]))


@feature("joins")
def stacking(b: Builder) -> None:
    first = b.signal(2, 3)
    second = b.like(first)
    text = b.choice(
        ["torch.stack([{0}, {1}], 1)", "torch.stack(({0}, {1}), dim=1)", "torch.cat([{0}[:, None], {1}[:, None]], 1)"]
    )
    b.emit(text.format(first.name, second.name), shape=(2, *first.shape))


@feature("joins")
def horizontal_stacking(b: Builder) -> None:
    first = b.signal(2, 3)
    second = b.like(first)
    b.emit(f"torch.hstack([{first.name}, {second.name}])", shape=(2 * first.shape[0], *first.shape[1:]))


@feature("joins")
def larger_of_two(b: Builder) -> None:
    first = b.signal()
    second = b.like(first)
    text = b.choice(
        ["torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.max({0}, {1})", "torch.where({0} > {1}, {0}, {1})"]
    )
    b.emit(text.format(first.name, second.name), shape=first.shape)


# --- in-place writes --------------------------------------------------------------------------------------------------------


@feature("in_place")
def overwritten(b: Builder) -> None:
    """In-place arithmetic on a value of its own."""
    first = b.signal()
    second = b.like(first)
    copy = b.local()
    write = b.choice(
        [
            "{2} += {1}",
            "{2} *= 0.5",
            "{2}.add_({1}, alpha=2)",
            "{2}.mul_(torch.sigmoid({1}))",
            "{2} -= 1",
            "{2}.relu_()",
            "{2}.clamp_(min=0)",
            "{2} /= 2",
            "F.relu_({2})",
            "{2}.sub_({1})",
            "{2}.mul_({1})",
        ]
    )
    start = b.choice(["{2} = {0}.clone()", "{2} = 1.5 * {0}", "{2} = {0} + {1}"])
    b.emit(start.format(first.name, second.name, copy), write.format(first.name, second.name, copy), copy, shape=first.shape)


@feature("slice_assignments")
def assigned_slice(b: Builder) -> None:
    """A part of a value is overwritten."""
    first = b.signal(fits=lambda value: value.shape[0] >= 2)
    second = b.like(first)
    copy = b.local()
    write = b.choice(
        [
            "{2}[:, 0] = {1}[:, 1]",
            "{2}[:, :1] = 0.0",
            "{2}[:, 1:] = {1}[:, 1:]",
            "{2}[:, 0] += {1}[:, 0]",
            "{2}[:, 1] *= 2",
            "{2}[:, ::2] = torch.relu({1}[:, ::2])",
            "{2}[..., 0] = {1}[..., 0]",
        ]
    )
    b.emit(f"{copy} = {first.name}.clone()", write.format(first.name, second.name, copy), copy, shape=first.shape)


@feature("slice_assignments")
def pieces_of_a_new_tensor(b: Builder) -> None:
    """Pieces are written into zeros, or into memory that they fill."""
    operand = b.signal(fits=lambda value: value.shape[0] >= 2)
    new, first = b.local(), operand.name
    writes = b.choice(
        [
            (f"torch.zeros_like({first})", f"{new}[:, 1:] = {first}[:, 1:]"),
            (f"torch.empty_like({first})", f"{new}[:, :1] = 2 * {first}[:, :1]", f"{new}[:, 1:] = {first}[:, 1:].relu()"),
            (f"{first}.new_zeros(*{first}.shape)", f"{new}[:, 0] = {first}[:, 1]", f"{new}[:, 1] = {first}[:, 0]"),
            (f"torch.ones_like({first})", f"{new}[:] = {first} * 2", f"{new}[:, :1] = {first}[:, :1]"),
        ]
    )
    b.emit(f"{new} = {writes[0]}", *writes[1:], new, shape=operand.shape)


@feature("slice_assignments")
def alias_read_after_a_write(b: Builder) -> None:
    """A view shows what is written to the value that it looks at."""
    operand = b.signal(fits=lambda value: value.shape[0] >= 2)
    copy, view = b.local(), b.local()
    look = b.choice([f"{view} = {copy}[:, :1]", f"{view} = {copy}.flatten(1)", f"{view} = {copy}.narrow(1, 0, 1)"])
    write = b.choice([f"{copy}.mul_(2)", f"{copy} += 1", f"{copy}.relu_()", f"{copy}[:, 0] = 0.3"])
    lines = [f"{copy} = 1.0 * {operand.name}", look, write]
    size = operand.size + (operand.size if "flatten" in look else operand.size // operand.shape[0])
    b.emit(*lines, f"torch.cat([{copy}.flatten(1), {view}.flatten(1)], 1)", shape=(size,))


@feature("slice_assignments")
def write_through_a_view(b: Builder) -> None:
    operand = b.signal(fits=lambda value: value.shape[0] >= 2)
    copy, view = b.local(), b.local()
    write = b.choice(
        [f"{view}.mul_(2)", f"{view} += 1", f"{view}.relu_()", f"{view}.zero_()", f"{view}.copy_({operand.name}[:, 1:2])"]
    )
    b.emit(f"{copy} = 1.0 * {operand.name}", f"{view} = {copy}[:, :1]", write, copy, shape=operand.shape)
