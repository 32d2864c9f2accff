"""Arguments that are computed from shapes when the network runs: alone, in tuples, in lists, in slices, and in arithmetic."""

from ..network import Builder
from .table import expression, feature


@feature("sizes")
def resized_to_another_size(b: Builder) -> None:
    """As decoders bring a coarse map to the size of a skip connection."""
    operand = b.signal(4)
    skip = b.signal(4, fits=lambda value: value.size // value.shape[0] * operand.shape[0] <= 300)
    text = b.choice(
        [
            "F.interpolate({0}, size=({1}.shape[2], {1}.shape[3]))",
            "F.interpolate({0}, size={1}.shape[2:])",
            "F.interpolate({0}, {1}.size()[-2:], mode='bilinear', align_corners=False)",
            "F.interpolate({0}, size=[{1}.size(2), {1}.size(-1)], mode='bilinear', align_corners=True)",
            "F.interpolate({0}, size=tuple({1}.shape[2:]), mode='nearest-exact')",
            "F.interpolate({0}, size=({1}.shape[2] + 1, {1}.shape[3] * 2 - 1), mode='bicubic')",
            "torch.cat([F.interpolate({0}, size=({1}.shape[2], {1}.shape[3])), {1}], 1)",
            "F.interpolate({0}, size=({1}.shape[-2], {1}.shape[-1]), mode='bilinear') + {1}.mean(1, keepdim=True)",
        ]
    )
    expression(b, text, operand, skip)


@feature("sizes")
def resized_by_a_factor_of_sizes(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: value.size <= 150)
    other = b.signal(4, fits=lambda value: max(value.shape[1:]) <= 2 * min(operand.shape[1:]))
    text = b.choice(
        [
            "F.interpolate({0}, scale_factor=({1}.shape[2] / {0}.shape[2], {1}.shape[3] / {0}.shape[3]))",
            "F.interpolate({0}, scale_factor=(1.0, ({0}.shape[3] + 2) / {0}.shape[3]), mode='bilinear')",
            "F.interpolate({0}, scale_factor=({0}.size(2) / {0}.size(2), 2.0), mode='bilinear', recompute_scale_factor=True)",
            "F.interpolate({0}, scale_factor=[{1}.shape[2] / {1}.shape[2] * 1.5, 1.5])",
        ]
    )
    expression(b, text, operand, other)


@feature("sizes")
def pooled_by_sizes(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 2)
    other = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 2)
    text = b.choice(
        [
            "F.adaptive_avg_pool2d({0}, ({1}.shape[2] // 2, {0}.shape[3]))",
            "F.adaptive_avg_pool2d({0}, {1}.shape[2] // 2)",
            "F.adaptive_max_pool2d({0}, ({0}.shape[2] // 2, {0}.shape[3] - 1))",
            "F.avg_pool2d({0}, {0}.shape[2:])",
            "F.avg_pool2d({0}, kernel_size=({0}.shape[2] // 2, 1))",
            "F.avg_pool2d({0}, kernel_size={0}.size()[2:]).flatten(1)",
            "F.avg_pool2d({0}, ({0}.shape[2], {0}.shape[3] // 2), stride=({0}.shape[2], 1))",
            "F.avg_pool2d({0}, 2, stride=1, padding={0}.shape[2] // {0}.shape[2])",
            "F.max_pool2d({0}, ({0}.shape[2], 1))",
            "F.avg_pool2d({0}, 2, divisor_override={0}.shape[1] + 1)",
        ]
    )
    expression(b, text, operand, other)


@feature("sizes")
def series_pooled_by_sizes(b: Builder) -> None:
    operand = b.signal(3, fits=lambda value: value.shape[1] >= 2)
    text = b.choice(
        [
            "F.avg_pool1d({0}, {0}.shape[-1])",
            "F.adaptive_avg_pool1d({0}, {0}.shape[2] // 2)",
            "F.max_pool1d({0}, kernel_size={0}.size(2) // 2)",
            "F.adaptive_max_pool1d({0}, ({0}.shape[2] - 1,))",
            "F.avg_pool1d({0}, ({0}.shape[-1] // 2,), stride={0}.shape[-1] // 2)",
            "{0}.unfold(-1, {0}.shape[-1] // 2, 1).mean(-1)",
        ]
    )
    expression(b, text, operand)


@feature("sizes")
def norm_over_sizes(b: Builder) -> None:
    operand = b.signal(2, 3, 4, fits=lambda value: value.shape[-1] > 1)
    text = b.choice(
        [
            "F.layer_norm({0}, {0}.shape[1:])",
            "F.layer_norm({0}, ({0}.shape[-1],))",
            "F.layer_norm({0}, {0}.size()[-1:])",
            "F.layer_norm({0}, [{0}.size(-1)], {w}, {v})",
            "F.layer_norm({0}, normalized_shape=tuple({0}.shape[1:]), eps=0.1)",
            "F.layer_norm({0}, {w}.shape, weight={w})",
            "F.rms_norm({0}, {0}.shape[-1:])",
            "F.rms_norm({0}, ({0}.shape[-1],), {w}, eps=0.01)",
            "F.group_norm({0}, {0}.shape[1])" if len(operand.shape) > 1 else "F.layer_norm({0}, list({0}.shape)[1:])",
            "{0} / ({0}.pow(2).sum(-1, keepdim=True) / {0}.shape[-1] + 0.01) ** 0.5",
        ]
    )
    expression(b, text, operand, w=(operand.shape[-1],), v=(operand.shape[-1],))


@feature("sizes")
def reshaped_to_sizes(b: Builder) -> None:
    operand = b.signal(3, 4)
    text = b.choice(
        [
            "{0}.contiguous().view({0}.shape[0], {0}.shape[1] * {0}.shape[2], -1)",
            "{0}.reshape(({0}.shape[0], -1))",
            "{0}.reshape(*{0}.shape[:2], -1)",
            "{0}.reshape({0}.size(0), {0}.size(-1), -1)",
            "{0}.transpose(1, 2).reshape({0}.shape)",
            "torch.reshape({0}, ({0}.shape[0], {0}.size(2), -1))",
            "{0}.flatten(1).unflatten(1, {0}.shape[1:])",
            "{0}.flatten(1).unflatten(-1, ({0}.shape[1], -1))",
            "{0}.flatten(0, 1).reshape({0}.shape[0], {0}.shape[1], *{0}.shape[2:])",
            "{0}.flatten(1).view([{0}.shape[0], {0}.shape[2], {0}.numel() // ({0}.shape[0] * {0}.shape[2])])",
            "{0}.reshape({0}.shape[:1] + (-1,))",
            "{0}.flatten(1).view_as({0})",
        ]
    )
    expression(b, text, operand)


@feature("sizes")
def expanded_to_sizes(b: Builder) -> None:
    operand = b.signal(3, 4)
    ones = ", ".join(["1"] * (len(operand.shape) - 1))
    rest = ", ".join(["-1"] * (len(operand.shape) - 1))
    text = b.choice(
        [
            "{0}.mean(1, keepdim=True).expand({0}.shape)",
            f"{{0}}[:, :1].expand(-1, {{0}}.shape[1], {rest})",
            "{0}[:, :1].expand(({0}.shape[0], {0}.size(1), *{0}.shape[2:]))",
            f"{{0}}[:, :1].repeat(1, {{0}}.shape[1], {ones})",
            f"{{0}}[:, -1:].tile((1, {{0}}.shape[1], {ones}))",
            "torch.broadcast_to({0}.amax(1, keepdim=True), {0}.shape)",
            "{0}[:, :1].repeat_interleave({0}.shape[1], 1)",
            "{w}.expand({0}.shape[0], *{0}.shape[1:]) * {0}",
            "{w}.expand({0}.size()) + {0}",
            "torch.cat([{0}, {0}.new_zeros({0}.shape)], 1)",
            "{0} + torch.full(({0}.shape[1], *[1] * ({0}.ndim - 2)), 0.3)",
            "{0} * torch.ones({0}.shape[1:]) - torch.linspace(0, 1, {0}.shape[-1])",
        ]
    )
    expression(b, text, operand, w=operand.shape)


@feature("sizes")
def folded_to_sizes(b: Builder) -> None:
    # A fold of single places is a view where their size is known, and a sum with a stabilizer where a run decides it.
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 2 and value.shape[-1] >= 4 and value.size <= 100)
    text = b.choice(
        [
            "F.fold(F.unfold({0}, 2), {0}.shape[2:], 2)",
            "F.fold(F.unfold({0}, 3, padding=1), output_size=({0}.size(2), {0}.size(3)), kernel_size=3, padding=1)",
            "F.unfold({0}, ({0}.shape[2] // 2, 1))",
            "F.unfold({0}, kernel_size=({0}.shape[2], 2), stride=({0}.shape[2], 1))",
            "F.fold(torch.relu(F.unfold({0}, (1, {0}.shape[3] // 2))), {0}.shape[2:], kernel_size=(1, {0}.shape[3] // 2))",
        ]
    )
    expression(b, text, operand)


@feature("sizes")
def convolution_with_settings_of_sizes(b: Builder) -> None:
    operand = b.signal(4, fits=lambda value: min(value.shape[1:]) >= 3)
    text = b.choice(
        [
            "F.conv2d({0}, {w}, {v}, padding=({0}.shape[2] // 4, 1))",
            "F.conv2d({0}, {w}, padding={w}.shape[2] // 2)",
            "F.conv2d({0}, {w}, {v}, padding=({w}.shape[-2] // 2, {w}.size(-1) // 2), dilation=1)",
            "F.conv2d({0}, {w}, padding=2, dilation=({0}.shape[2] // 2, {0}.shape[2] // {0}.shape[2]))",
            "F.conv2d({0}, {w}, bias={v}, dilation={0}.size(3) // {0}.size(3), stride={0}.shape[3] // 2)",
            "F.conv2d({0}, {w}, stride=({0}.shape[2] - 1, 1))",
            "F.conv2d({0}, {g}, padding=1, groups={0}.shape[1])",
            "torch.conv2d({0}, {g}, None, 1, [{g}.shape[2] // 2, 1], 1, {0}.size(1))",
            "F.conv_transpose2d({0}, {t}, {v}, stride={0}.shape[2] // {0}.shape[2] + 1, output_padding=(0, {0}.shape[3] % 2))",
            "F.conv2d(F.pad({0}, ({w}.shape[3] // 2, {w}.shape[3] // 2, 0, {0}.shape[2] % 2)), {w}, {v})",
        ]
    )
    channels = operand.shape[0]
    expression(b, text, operand, w=(2, channels, 3, 3), v=(2,), g=(channels, 1, 3, 3), t=(channels, 2, 2, 2))


@feature("sizes")
def sliced_by_sizes(b: Builder) -> None:
    operand = b.signal(fits=lambda value: value.shape[0] >= 2)
    other = b.signal(fits=lambda value: value.shape[-1] <= operand.shape[-1] and len(value.shape) == len(operand.shape))
    text = b.choice(
        [
            "{0}[:, :{0}.shape[1] // 2]",
            "{0}[:, {0}.shape[1] // 2:]",
            "{0}[:, 1:{0}.shape[1]]",
            "{0}[:, {0}.size(1) - 2:]",
            "{0}[..., :{1}.shape[-1]]",
            "{0}[..., {0}.shape[-1] - {1}.shape[-1]:]",
            "{0}[..., ({0}.size(-1) - {1}.size(-1)) // 2:({0}.size(-1) - {1}.size(-1)) // 2 + {1}.size(-1)]",
            "{0}[:, ::{0}.shape[1] - 1]",
            "{0}[:, -({0}.shape[1] // 2):, ...]",
            "{0}.narrow(1, {0}.shape[1] // 2, 1)",
            "torch.narrow({0}, 1, 0, {0}.shape[1] - 1)",
            "torch.split({0}, {0}.shape[1] // 2, dim=1)[0]",
            "{0}.split([1, {0}.shape[1] - 1], 1)[1]",
            "{0}.split(({0}.shape[1] // 2, {0}.shape[1] - {0}.shape[1] // 2), dim=1)[0]",
            "{0}.roll({0}.shape[-1] // 2, -1)",
            "torch.roll({0}, shifts=({0}.shape[1] // 2, 1), dims=(1, -1))",
            "{0}[:, torch.arange({0}.shape[1] - 1, -1, -1)]",
            "torch.index_select({0}, 1, torch.arange({0}.shape[1] // 2))",
            "{0}.unbind(1)[0][:, None]",
        ]
    )
    expression(b, text, operand, other)


@feature("sizes")
def item_at_a_size(b: Builder) -> None:
    operand = b.signal(3, 4)
    text = b.choice(
        [
            "{0}[:, {0}.shape[1] - 1]",
            "{0}[:, {0}.size(1) // 2, ...]",
            "{0}.select(-1, {0}.shape[-1] // 2)",
            "{0}[:, :, {0}.shape[2] // 2]",
            "{0}.sum(-1) / {0}.shape[-1]",
            "{0}.flatten(2).sum(2) / ({0}.shape[2] * {0}.shape[-1]) ** 0.5",
            "{0}.mean(tuple(range(2, {0}.ndim)))",
        ]
    )
    expression(b, text, operand)


@feature("sizes")
def padded_to_sizes(b: Builder) -> None:
    """As decoders pad a map to the size of a skip connection, and windows pad to a multiple."""
    operand = b.signal(4)
    other = b.signal(4, fits=lambda value: all(x >= y for x, y in zip(value.shape[1:], operand.shape[1:], strict=True)))
    text = b.choice(
        [
            "F.pad({0}, [({1}.size(3) - {0}.size(3)) // 2, {1}.size(3) - {0}.size(3) - ({1}.size(3) - {0}.size(3)) // 2])",
            "F.pad({0}, (0, {1}.shape[3] - {0}.shape[3], 0, {1}.shape[2] - {0}.shape[2]))",
            "F.pad({0}, (0, -{0}.shape[3] % 4, 0, -{0}.shape[2] % 4))",
            "F.pad({0}, (0, (4 - {0}.size(3) % 4) % 4), value=0.5)",
            "F.pad({0}, ({0}.shape[3] // 2, 0, 0, 0), mode='replicate')",
            "torch.cat([F.pad({0}, (0, {1}.size(3) - {0}.size(3), 0, {1}.size(2) - {0}.size(2))), {1}], dim=1)",
            "F.pad({0}, (0, -({0}.shape[3] // 2)))",
        ]
    )
    expression(b, text, operand, other)
