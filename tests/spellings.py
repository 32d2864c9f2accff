"""Pairs of layers and functions, named and written by hand: two spellings of one layer are one layer.

Each network has parameters of its own and takes one input. `named` and `written` are two forwards of the same function.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Pair:
    """One layer in two spellings, inside a small network: functions of the network and a value."""

    named: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    written: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    network: type

    @property
    def captures(self) -> tuple[str, ...]:
        """The front ends that trace it: a symbolic trace has no y[...] = value."""
        return ("export",) if self.written in _WRITING else ("symbolic", "export")

    @property
    def kind(self) -> str:
        """Whether the layer is linear, a "layer", recurrent, a "series", or a softmax, a "function"."""
        if issubclass(self.network, Series):
            return "series"
        return "layer" if issubclass(self.network, (Dense, Images, PreActivation)) else "function"


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Network(nn.Module):
    """A network with a layer given as a function of the network and a value, at its begin and in its middle."""

    shape: tuple[int, ...]

    def __init__(self, layer: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer
        self.build()
        self.double().eval()

    def build(self) -> None:
        raise NotImplementedError

    def example(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Dense(Network):
    """Two dense layers by hand around a ReLU, and a classifier."""

    shape = (3, 6)

    def build(self) -> None:
        self.weight, self.bias, self.scale, self.shift = _parameter(6, 6), _parameter(6), _parameter(6), _parameter(6)
        self.register_buffer("mask", (torch.rand(6, 6) > 0.4).float())
        self.register_buffer("channels", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("lower", torch.ones(6, 6).tril())
        angles = torch.arange(6, dtype=torch.float64)
        self.register_buffer("waves", torch.cos(angles[:, None] * angles))
        self.register_buffer("integers", torch.randint(-127, 128, (6, 6)).to(torch.int8))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self, torch.relu(self.layer(self, x)))))


class Sequences(Dense):
    """The same for vectors along a sequence."""

    shape = (3, 5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(1)


class Images(Network):
    """Two convolutions by hand around a ReLU, and a classifier."""

    shape = (2, 4, 8, 8)

    def build(self) -> None:
        self.weight, self.bias = _parameter(4, 4, 3, 3), _parameter(4)
        self.scale, self.shift = _parameter(4), _parameter(4)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("variance", torch.rand(4))
        self.register_buffer("kept", torch.tensor([True, False, True, True]))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.layer(self, torch.relu(self.layer(self, x))))
        return self.head(features.mean((2, 3)))


class PreActivation(Network):
    """A residual block whose batch norm comes before the ReLU and the convolution."""

    shape = (2, 3, 6, 6)

    def build(self) -> None:
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 4)
        for tensor in (self.norm.running_mean, self.norm.weight, self.norm.bias):
            tensor.data.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head((x + self.last(torch.relu(self.layer(self, x)))).mean((2, 3)))


class Activated(Network):
    """An activation by hand between two dense layers."""

    shape = (3, 6)

    def build(self) -> None:
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self, self.first(x)))


class Attention(Network):
    """Scores of attention, their softmax by hand, and a classifier of the mean."""

    shape = (2, 5, 6)

    def build(self) -> None:
        self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.register_buffer("allowed", torch.ones(5, 5).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 6**0.5
        return self.head((x + self.layer(self, scores) @ self.value(x)).mean(1))


class Weighted(Attention):
    """The same, where the layer also weighs the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 6**0.5
        return self.head((x + self.layer(self, (scores, self.value(x)))).mean(1))


class Pooled(Attention):
    """Attention pooling: one score for each place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self, (self.query(torch.relu(self.key(x)))[..., :1], self.value(x))))


class Places(Network):
    """A softmax over the places of a map, for each channel."""

    shape = (2, 3, 4, 4)

    def build(self) -> None:
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.layer(self, self.conv(x)) * x).sum((2, 3)))


class Experts(Network):
    """A mixture of three experts that a router chooses from, and a classifier."""

    shape = (4, 6)

    def build(self) -> None:
        self.first, self.router, self.head = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = torch.relu(self.first(x))
        results = torch.stack([expert(states) for expert in self.experts], 1)
        return self.head(self.layer(self, (self.router(states), results)))


class Graph(Network):
    """Attention over the edges of a graph, grouped by their targets."""

    shape = (5, 6)

    def build(self) -> None:
        self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.of_source, self.of_target = nn.Linear(6, 1), nn.Linear(6, 1)
        edges = [[0, 1, 2, 3, 4, 0, 2, 4, 1, 3], [0, 0, 0, 1, 1, 2, 3, 3, 4, 4]]
        self.register_buffer("source", torch.tensor(edges[0]))
        self.register_buffer("target", torch.tensor(edges[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.value(x)
        scores = F.leaky_relu(self.of_source(values)[self.source] + self.of_target(values)[self.target], 0.2)
        weights = self.layer(self, scores[:, 0])
        out = torch.zeros_like(values).index_add(0, self.target, weights[:, None] * values[self.source])
        return self.head(torch.relu(out))


class Edges(Graph):
    """The same, where the layer also weighs the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.value(x)
        scores = F.leaky_relu(self.of_source(values)[self.source] + self.of_target(values)[self.target], 0.2)
        return self.head(torch.relu(self.layer(self, (scores[:, 0], values))))


class Series(Network):
    """The last state of a recurrent layer, which is a function of the network and a series, and a classifier."""

    shape = (2, 5, 3)

    def build(self) -> None:
        self.lstm, self.gru, self.rnn = (one(3, 6, batch_first=True) for one in (nn.LSTM, nn.GRU, nn.RNN))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self, x))


# --- dense layers -----------------------------------------------------------------------------------------------------------


def _linear(m, x):
    return F.linear(x, m.weight, m.bias)


def _biases_of_outputs(m, x):
    a, b, c, d, e, f = (x @ m.weight.T).unbind(1)
    bias = m.bias
    return torch.stack([a + bias[0], b + bias[1], c + bias[2], d + bias[3], e + bias[4], f + bias[5]], 1)


def _biases_of_halves(m, x):
    first, last = (x @ m.weight.T).view(x.shape[0], 2, 3).unbind(1)
    return torch.cat([first + m.bias[:3], last + m.bias[3:]], 1)


def _added_in_place(m, x):
    y = x @ m.weight.T
    y += m.bias
    return y


def _tensordot(m, x):
    return torch.tensordot(x, m.weight, dims=([-1], [1])) + m.bias


def _with_expanded(m, x):
    y = x @ m.weight.T
    return y + m.bias.unsqueeze(0).expand_as(y)


def _of_columns(m, x):
    return (m.weight @ x.T + m.bias[:, None]).T


def _batched(m, x):
    return torch.bmm(x, m.weight.T.unsqueeze(0).expand(x.shape[0], -1, -1)) + m.bias


def _batched_sum(m, x):
    weight = m.weight.T.expand(x.shape[0], 6, 6)
    return torch.baddbmm(m.bias, x, weight)


def _of_a_view(m, x):
    flat = x.reshape(-1, 6) @ m.weight.T
    return flat.view(x.shape[0], x.shape[1], 6) + m.bias


def _in_heads(m, x):
    heads = torch.einsum("bti,hdi->bthd", x, m.weight.view(2, 3, 6))
    return (heads + m.bias.view(2, 3)).flatten(2)


def _one_output(m, x):
    return x + F.linear(x, m.weight[:1] / 9, m.bias[:1].abs())


def _heads_on_the_left(m, x):
    heads = m.weight.view(2, 3, 6) @ x[:, None].mT + m.bias.view(2, 3, 1)
    return heads.permute(0, 3, 1, 2).flatten(2)


def _standardized(m, x):
    return F.linear(x, (m.weight - m.weight.mean(1, keepdim=True)) / m.weight.std(1, keepdim=True), m.bias)


def _standardized_by_hand(m, x):
    weight = m.weight - m.weight.mean(1, keepdim=True)
    return x @ (weight / m.weight.std(1, keepdim=True)).t() + m.bias


def _column_by_column(m, x):
    out = x.new_empty(x.shape[0], 6)
    for place in range(6):
        out[:, place] = x @ m.weight[place] + m.bias[place]
    return out


def _half_by_half(m, x):
    out = torch.zeros_like(x)
    out[:, :3] = x @ m.weight[:3].T
    out[:, 3:] = x @ m.weight[3:].T
    return out + m.bias


def _written_over(m, x):
    y = x @ m.weight.T
    y[:] = y + m.bias
    return y


def _in_parts(m, x):
    y = x @ m.weight.T
    y[:, :2] += m.bias[:2]
    y[:, 2:] += m.bias[2:]
    return y


def _in_part(m, x):
    y = x @ m.weight.T + m.bias
    y[:, 1:3] *= m.scale[1:3]
    return y


def _scaled_in_part(m, x):
    factor = torch.cat([torch.ones_like(m.scale[:1]), m.scale[1:3], torch.ones_like(m.scale[3:])])
    return F.linear(x, m.weight * factor[:, None], m.bias * factor)


def _with_column(m, x):
    both = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    return F.linear(both, torch.cat([m.weight, m.bias[:, None]], 1))


def _filled(constant):
    """A dense layer of whose outputs those without a mask are a constant, which a function of the network makes."""

    def layer(m, x):
        kept = m.channels.to(x.dtype)
        return F.linear(x, m.weight * kept[:, None], m.bias * kept + constant(m) * (1 - kept))

    return layer


def _of_low_rank(m, x):
    return F.linear(F.linear(x, m.weight[:2]), m.weight[:, :2], m.bias)


def _batch_norm_of(m, value):
    return F.batch_norm(value, m.shift.detach(), m.scale.detach() ** 2, None, m.bias)


def _with_batch_norm(m, x):
    factor = torch.rsqrt(m.scale**2 + 1e-5)
    return F.linear(x, m.weight * factor[:, None], m.bias - m.shift * factor)


DENSE = {
    "(x @ W.T).type_as(x) + b": (_linear, lambda m, x: (x @ m.weight.T).type_as(x) + m.bias),
    "(x @ W.T).to(x.dtype) * 1.0 + b": (_linear, lambda m, x: (x @ m.weight.T).to(x.dtype) * 1.0 + m.bias),
    "x @ W.T + b": (_linear, lambda m, x: x @ m.weight.T + m.bias),
    "b + x @ W.t()": (_linear, lambda m, x: m.bias + x @ m.weight.t()),
    "x.matmul(W.mT).add(b)": (_linear, lambda m, x: x.matmul(m.weight.mT).add(m.bias)),
    "mm, then add": (_linear, lambda m, x: torch.add(torch.mm(x, m.weight.transpose(0, 1)), m.bias)),
    "add in place": (_linear, _added_in_place),
    "x @ W.T - (-b)": (_linear, lambda m, x: x @ m.weight.T - (-m.bias)),
    "-(-b - x @ W.T)": (_linear, lambda m, x: -(-m.bias - x @ m.weight.T)),
    "inner": (_linear, lambda m, x: torch.inner(x, m.weight) + m.bias),
    "tensordot": (_linear, _tensordot),
    "einsum": (_linear, lambda m, x: torch.einsum("bi,oi->bo", x, m.weight) + m.bias),
    "einsum of the transposed": (_linear, lambda m, x: torch.einsum("oi,bi->ob", m.weight, x).T + m.bias),
    "addmm": (_linear, lambda m, x: torch.addmm(m.bias, x, m.weight.T)),
    "addmm with factors": (
        lambda m, x: F.linear(x, 0.5 * m.weight, 3 * m.bias),
        lambda m, x: torch.addmm(m.bias, x, m.weight.T, beta=3, alpha=0.5),
    ),
    "vecdot": (_linear, lambda m, x: torch.linalg.vecdot(x[:, None, :], m.weight) + m.bias),
    "W @ x.T + b": (_linear, _of_columns),
    "linear * scale + b": (
        lambda m, x: F.linear(x, m.weight * m.scale[:, None], m.bias),
        lambda m, x: F.linear(x, m.weight) * m.scale + m.bias,
    ),
    "linear / -2 + b": (
        lambda m, x: F.linear(x, m.weight / -2, m.bias),
        lambda m, x: F.linear(x, m.weight) / -2 + m.bias,
    ),
    "(linear with bias - shift) * scale": (
        lambda m, x: F.linear(x, m.weight * m.scale[:, None], (m.bias - m.shift) * m.scale),
        lambda m, x: (F.linear(x, m.weight, m.bias) - m.shift) * m.scale,
    ),
    "weight * mask": (
        lambda m, x: F.linear(x, m.weight * m.mask, m.bias),
        lambda m, x: x @ (m.weight * m.mask).T + m.bias,
    ),
    "weight * tril": (
        lambda m, x: F.linear(x, m.weight.tril(), m.bias),
        lambda m, x: x @ (m.weight * torch.ones(6, 6, dtype=m.weight.dtype).tril()).T + m.bias,
    ),
    "x @ ones(dtype=x.dtype).tril()": (
        lambda m, x: F.linear(x, m.lower),
        lambda m, x: x @ torch.ones(6, 6, dtype=x.dtype, device=x.device).tril().T,
    ),
    "x @ x.new_ones(6, 6).tril()": (lambda m, x: F.linear(x, m.lower), lambda m, x: x @ x.new_ones(6, 6).tril().T),
    "x @ x.new_tensor(...)": (
        lambda m, x: F.linear(x, m.lower),
        lambda m, x: x @ x.new_tensor([[float(row <= column) for column in range(6)] for row in range(6)]),
    ),
    "x @ (arange >= arange).to(x.dtype)": (
        lambda m, x: F.linear(x, m.lower),
        lambda m, x: x @ (torch.arange(6) >= torch.arange(6)[:, None]).to(x.dtype),
    ),
    "x @ ones.tril().to(x)": (lambda m, x: F.linear(x, m.lower), lambda m, x: x @ torch.ones(6, 6).tril().to(x).T),
    "x @ cos(arange * arange)": (
        lambda m, x: F.linear(x, m.waves),
        lambda m, x: x @ torch.cos(torch.arange(6, dtype=x.dtype)[:, None] * torch.arange(6, dtype=x.dtype)),
    ),
    "(x * arange).sum(1)": (
        lambda m, x: F.linear(x, torch.arange(6, dtype=torch.float64)[None]) + m.bias,
        lambda m, x: (x * torch.arange(6, device=x.device)).sum(1, keepdim=True) + m.bias,
    ),
    "standardized weight": (_standardized, _standardized_by_hand),
    "W @ x[..., None]": (_linear, lambda m, x: (m.weight @ x[..., None])[..., 0] + m.bias),
    "+ b.expand_as": (_linear, _with_expanded),
    "sum of products of x[:, None, :]": (_linear, lambda m, x: (x[:, None, :] * m.weight).sum(-1) + m.bias),
    "sum of products": (_linear, lambda m, x: (x.unsqueeze(-2) * m.weight).sum(-1) + m.bias),
    "one output: (x * w).sum(-1, keepdim=True) + b": (
        _one_output,
        lambda m, x: x + ((x * (m.weight[0] / 9)).sum(-1, keepdim=True) + m.bias[:1].abs()),
    ),
    "one output: (x * w).sum(-1)[:, None] + b": (
        _one_output,
        lambda m, x: x + ((x * (m.weight[0] / 9)).sum(-1)[:, None] + m.bias[:1].abs()),
    ),
    "+ b.repeat_interleave": (_linear, lambda m, x: x @ m.weight.T + m.bias[None].repeat_interleave(x.shape[0], 0)),
    "+ b.repeat": (_linear, lambda m, x: x @ m.weight.T + m.bias.repeat(x.shape[0], 1)),
    "+ b.tile": (_linear, lambda m, x: x @ m.weight.T + m.bias.tile(x.shape[0], 1)),
    "+ b.to(x.dtype)": (_linear, lambda m, x: x @ m.weight.type_as(x).T + m.bias.to(device=x.device, dtype=x.dtype)),
    "weight * mask.to(x.dtype)": (
        lambda m, x: F.linear(x, m.weight * m.mask, m.bias),
        lambda m, x: x @ (m.weight * m.mask.to(x.dtype)).T + m.bias,
    ),
    "integers.to(x.dtype) * scale": (
        lambda m, x: F.linear(x, m.integers.double() * m.scale[:, None], m.bias),
        lambda m, x: x @ (m.integers.to(x.dtype) * m.scale[:, None]).T + m.bias,
    ),
    "linear * numbers": (
        lambda m, x: F.linear(x, m.weight * (torch.arange(6.0).double()[:, None] / 6 + 1), m.bias),
        lambda m, x: F.linear(x, m.weight) * (torch.arange(6, dtype=torch.float64) / 6 + 1) + m.bias,
    ),
    "a column of ones": (_linear, _with_column),
    "a column of ones of a fixed size": (
        _linear,
        lambda m, x: torch.cat([torch.ones(3, 1, dtype=torch.double), x], -1) @ torch.cat([m.bias[:, None], m.weight], 1).T,
    ),
    "a parameter among the features": (
        lambda m, x: F.linear(x, m.weight, m.weight.T @ m.shift + m.bias),
        lambda m, x: F.linear(torch.cat([m.shift.expand(len(x), -1), x], 1), torch.cat([m.weight.T, m.weight], 1), m.bias),
    ),
    "padded with ones": (
        _linear,
        lambda m, x: F.linear(F.pad(x, (0, 1), value=1.0), torch.cat([m.weight, m.bias[:, None]], 1)),
    ),
    "@ diag(scale)": (
        lambda m, x: F.linear(x, m.weight * m.scale[:, None], m.bias),
        lambda m, x: x @ m.weight.T @ torch.diag(m.scale) + m.bias,
    ),
    "scaled by einsum": (
        lambda m, x: F.linear(x, m.weight * m.scale[:, None], m.bias),
        lambda m, x: torch.einsum("bi,i->bi", x @ m.weight.T, m.scale) + m.bias,
    ),
    "scaled by an einsum of three, + b": (
        lambda m, x: F.linear(x, m.weight * m.scale[:, None], m.bias),
        lambda m, x: torch.einsum("bi,oi,o->bo", x, m.weight, m.scale) + m.bias,
    ),
    "einsum of x and two weights": (
        lambda m, x: F.linear(F.linear(x, m.weight * m.scale), m.weight, m.bias),
        lambda m, x: torch.einsum("bi,ji,i,oj->bo", x, m.weight, m.scale, m.weight) + m.bias,
    ),
    "einsum of x and two factors of a weight": (
        _of_low_rank,
        lambda m, x: torch.einsum("bi,ir,ro->bo", x, m.weight[:2].T, m.weight[:, :2].T) + m.bias,
    ),
    "multi_dot of x and two factors of a weight": (
        _of_low_rank,
        lambda m, x: torch.linalg.multi_dot([x, m.weight[:2].T, m.weight[:, :2].T]) + m.bias,
    ),
    "einsum of x, a weight and a mask": (
        lambda m, x: F.linear(x, m.weight * m.mask, m.bias),
        lambda m, x: torch.einsum("bi,oi,oi->bo", x, m.weight, m.mask) + m.bias,
    ),
    "+ b * ones_like": (_linear, lambda m, x: (y := x @ m.weight.T) + m.bias * torch.ones_like(y)),
    "+ b * ones of a fixed size": (_linear, lambda m, x: x @ m.weight.T + m.bias * torch.ones(3, 1, dtype=torch.double)),
    "+ integers": (
        lambda m, x: x @ m.weight.T + m.integers[0].to(x.dtype),
        lambda m, x: x @ m.weight.T + m.integers[0],
    ),
    "integers of each sample - x @ W.T": (
        lambda m, x: torch.arange(3, dtype=torch.double)[:, None] - x @ m.weight.T,
        lambda m, x: torch.tensor([[0], [1], [2]]) - x @ m.weight.T,
    ),
    "+ einsum(b, ones of a fixed size)": (
        _linear,
        lambda m, x: x @ m.weight.T + torch.einsum("o,b->bo", m.bias, torch.ones(3, dtype=torch.double)),
    ),
    "+ embedding(zeros of a fixed size, b)": (
        _linear,
        lambda m, x: x @ m.weight.T + F.embedding(torch.zeros(3, dtype=torch.long), m.bias[None]),
    ),
    "+ outer(ones, b)": (_linear, lambda m, x: x @ m.weight.T + torch.outer(x.new_ones(x.shape[0]), m.bias)),
    "+ linear(zeros, W, b)": (_linear, lambda m, x: x @ m.weight.T + F.linear(torch.zeros_like(x), m.weight, m.bias)),
    "+ ones @ b": (_linear, lambda m, x: x @ m.weight.T + x.new_ones(x.shape[0], 1) @ m.bias[None]),
    "+ linear(ones, b)": (_linear, lambda m, x: x @ m.weight.T + F.linear(torch.ones_like(x[:, :1]), m.bias[:, None])),
    "+ einsum(ones, b)": (_linear, lambda m, x: x @ m.weight.T + torch.einsum("b,o->bo", x.new_ones(x.shape[0]), m.bias)),
    "+ b.repeat.view(sizes)": (_linear, lambda m, x: (y := x @ m.weight.T) + m.bias.repeat(x.shape[0]).view(y.shape)),
    "+ b[None][zeros]": (_linear, lambda m, x: x @ m.weight.T + m.bias[None][torch.zeros(x.shape[0], dtype=torch.long)]),
    "+ embedding(zeros, b)": (
        _linear,
        lambda m, x: x @ m.weight.T + F.embedding(torch.zeros_like(x[:, 0], dtype=torch.long), m.bias[None]),
    ),
    "+ addmm(b, zeros, W)": (_linear, lambda m, x: x @ m.weight.T + torch.addmm(m.bias, torch.zeros_like(x), m.weight)),
    "+ addmv(b, W, zeros)": (
        _linear,
        lambda m, x: x @ m.weight.T + torch.addmv(m.bias, m.weight, torch.zeros(6, dtype=x.dtype)),
    ),
    "+ (zeros + b)": (_linear, lambda m, x: x @ m.weight.T + (x.new_zeros(x.shape[0], 6) + m.bias)),
    "stack([x @ W.T, b]).sum": (_linear, lambda m, x: torch.stack([x @ m.weight.T, m.bias.expand(x.shape[0], 6)]).sum(0)),
    "cat([x @ W.T, b]).sum": (
        _linear,
        lambda m, x: torch.cat([(y := x @ m.weight.T).unsqueeze(-1), m.bias.expand_as(y)[..., None]], -1).sum(-1),
    ),
    "+ (0 * y + b)": (_linear, lambda m, x: (y := x @ m.weight.T) + (0 * y + m.bias)),
    "+ (y * zeros + b)": (_linear, lambda m, x: (y := x @ m.weight.T) + (y * torch.zeros_like(y) + m.bias)),
    "+ zeros_like(y).copy_(b)": (_linear, lambda m, x: (y := x @ m.weight.T) + torch.zeros_like(y).copy_(m.bias)),
    "broadcast_tensors, then add": (
        _linear,
        lambda m, x: (both := torch.broadcast_tensors(x @ m.weight.T, m.bias))[0] + both[1],
    ),
    "2 * lerp(x @ W.T, b, 0.5)": (_linear, lambda m, x: 2 * torch.lerp(x @ m.weight.T, m.bias.expand(x.shape[0], 6), 0.5)),
    "+ b at expanded places": (_linear, lambda m, x: x @ m.weight.T + m.bias[torch.arange(6).expand(3, 6)]),
    "+ torch.take(b)": (_linear, lambda m, x: x @ m.weight.T + torch.take(m.bias, torch.arange(18).view(3, 6) % 6)),
    "+ the last row of a table": (
        _linear,
        lambda m, x: x @ m.weight.T + torch.stack([m.shift, m.bias])[torch.ones(3, dtype=torch.long)],
    ),
    "where(mask of outputs, y, 3)": (
        _filled(lambda m: 3.0),
        lambda m, x: torch.where(m.channels, F.linear(x, m.weight, m.bias), 3.0),
    ),
    "where(mask of outputs, parameter, y)": (
        _filled(lambda m: m.shift),
        lambda m, x: torch.where(~m.channels, m.shift, x @ m.weight.T + m.bias),
    ),
    "y.masked_fill(mask of outputs, 3)": (
        _filled(lambda m: 3.0),
        lambda m, x: F.linear(x, m.weight, m.bias).masked_fill(~m.channels, 3.0),
    ),
    "0 + x @ W.T - 0.0 + b": (_linear, lambda m, x: 0 + x @ m.weight.T - 0.0 + m.bias),
    "x @ W.T, a term for each half": (
        _linear,
        lambda m, x: torch.cat([(y := x @ m.weight.T)[:, :2] + m.bias[:2], y[:, 2:] + m.bias[2:]], 1),
    ),
    "x @ W.T, a factor for one half, + b": (
        lambda m, x: F.linear(x, m.weight * torch.cat([m.scale[:2], torch.ones_like(m.scale[2:])])[:, None], m.bias),
        lambda m, x: torch.cat([(y := x @ m.weight.T)[:, :2] * m.scale[:2], y[:, 2:]], 1) + m.bias,
    ),
    "addbmm": (_linear, lambda m, x: torch.addbmm(m.bias, x[None], m.weight.T[None])),
    "addcmul(b, x @ W.T, ones)": (_linear, lambda m, x: torch.addcmul(m.bias, x @ m.weight.T, x.new_ones(6))),
    "addcdiv(x @ W.T, b, ones)": (_linear, lambda m, x: torch.addcdiv(x @ m.weight.T, m.bias, x.new_ones(6))),
    "cumulative sum of products, its last": (
        _linear,
        lambda m, x: (x[:, None, :] * m.weight).cumsum(-1)[..., -1] + m.bias,
    ),
    "mean of products * n": (_linear, lambda m, x: (x[:, None, :] * m.weight).mean(-1) * 6 + m.bias),
    "y[:] = y + b": (_linear, _written_over),
    "y[:, :n] += b[:n], y[:, n:] += b[n:]": (_linear, _in_parts),
    "y[:, n:m] *= scale[n:m]": (_scaled_in_part, _in_part),
    "y[:, i] = x @ W[i] + b[i]": (_linear, _column_by_column),
    "y[:, :n] = x @ W[:n].T": (_linear, _half_by_half),
    "a bias for each part of y.unbind": (
        _linear,
        _biases_of_outputs,
    ),
    "a bias for each part of y.view(n, 2, 3).unbind": (
        _linear,
        _biases_of_halves,
    ),
    "two halves under hstack": (_linear, lambda m, x: torch.hstack([x @ m.weight[:3].T, x @ m.weight[3:].T]) + m.bias),
    "two halves under cat": (_linear, lambda m, x: torch.cat([x @ m.weight[:3].T, x @ m.weight[3:].T], -1) + m.bias),
    "outputs under cat": (
        _linear,
        lambda m, x: torch.cat([(x @ m.weight[place])[:, None] for place in range(6)], 1) + m.bias,
    ),
    "outputs under stack": (
        _linear,
        lambda m, x: torch.stack([(x * m.weight[place]).sum(-1) + m.bias[place] for place in range(6)], -1),
    ),
}

SEQUENCES = {
    "x @ W.T + b, of sequences": (_linear, lambda m, x: x @ m.weight.T + m.bias),
    "bmm of an expanded weight": (_linear, _batched),
    "baddbmm of an expanded weight": (_linear, _batched_sum),
    "matmul of a view": (_linear, _of_a_view),
    "einsum of sequences": (_linear, lambda m, x: torch.einsum("...i,oi->...o", x, m.weight) + m.bias),
    "einsum in heads": (_linear, _in_heads),
    "tensordot of sequences": (_linear, lambda m, x: torch.tensordot(m.weight, x, ([1], [2])).permute(1, 2, 0) + m.bias),
    "a column of ones, of sequences": (_linear, _with_column),
    "W of heads @ x[:, None].mT + b": (_linear, _heads_on_the_left),
    "einsum, + b of heads": (
        _linear,
        lambda m, x: (
            (torch.einsum("bpd,hed->bhpe", x, m.weight.view(2, 3, 6)) + m.bias.view(2, 1, 3)).permute(0, 2, 1, 3).flatten(2)
        ),
    ),
    "heads, put together, + b": (
        _linear,
        lambda m, x: torch.einsum("btd,hed->bhte", x, m.weight.view(2, 3, 6)).permute(0, 2, 1, 3).flatten(2) + m.bias,
    ),
    "x[:, None] @ W of heads + b of heads": (
        _linear,
        lambda m, x: (x[:, None] @ m.weight.view(2, 3, 6).mT + m.bias.view(2, 1, 3)).transpose(1, 2).flatten(2),
    ),
    "x.unsqueeze(1) @ W of heads, put together, + b": (
        _linear,
        lambda m, x: (x.unsqueeze(1) @ m.weight.view(2, 3, 6).mT).transpose(1, 2).flatten(2) + m.bias,
    ),
    "batch norm of the transposed": (
        _with_batch_norm,
        lambda m, x: _batch_norm_of(m, F.linear(x, m.weight).transpose(1, 2)).transpose(1, 2),
    ),
    "batch norm of rows": (
        _with_batch_norm,
        lambda m, x: _batch_norm_of(m, (y := F.linear(x, m.weight)).view(-1, 6)).view(y.shape),
    ),
    "W @ x.mT": (_linear, lambda m, x: (m.weight @ x.mT + m.bias[:, None]).mT),
}

# --- convolutions -----------------------------------------------------------------------------------------------------------


def _conv(m, x, scale=None, bias=None):
    """A convolution; if a scale and a bias of the channels are given, one whose channels are scaled, with this bias."""
    weight = m.weight if scale is None else m.weight * scale[:, None, None, None]
    return F.conv2d(x, weight, m.bias if bias is None else bias, padding=1)


def _channels_written(m, x):
    y = _conv(m, x)
    y[:, ~m.kept] = 2.0
    return y


def _padded(m, x):
    return F.conv2d(F.pad(x, (1, 1, 1, 1)), m.weight, m.bias)


def _between_zeros(m, x):
    zeros = x.new_zeros(*x.shape[:-1], 1)
    x = torch.cat([zeros, x, zeros], -1)
    zeros = x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    return F.conv2d(torch.cat([zeros, x, zeros], -2), m.weight, m.bias)


def _frozen(m, x):
    scale = m.norm.weight.view(1, -1, 1, 1) * (m.norm.running_var.view(1, -1, 1, 1) + m.norm.eps).rsqrt()
    return x * scale + (m.norm.bias.view(1, -1, 1, 1) - m.norm.running_mean.view(1, -1, 1, 1) * scale)


def _norm_by_hand(m, x):
    mean, variance, weight, bias = (
        one[:, None, None] for one in (m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias)
    )
    return (x - mean) / torch.sqrt(variance + m.norm.eps) * weight + bias


BLOCKS = {
    "batch norm before ReLU, to(memory_format)": (
        lambda m, x: m.norm(x),
        lambda m, x: m.norm(x).to(memory_format=torch.channels_last),
    ),
    "batch norm before ReLU, frozen": (lambda m, x: m.norm(x), _frozen),
    "batch norm before ReLU, by hand": (lambda m, x: m.norm(x), _norm_by_hand),
}


def _written_between_zeros(m, x):
    padded = x.new_zeros(x.shape[0], 4, 10, 10)
    padded[:, :, 1:-1, 1:-1] = x
    return F.conv2d(padded, m.weight, m.bias)


def _grouped(m, x):
    return F.conv2d(x, m.weight[:, :2], m.bias, padding=1, groups=2)


def _of_slices(m, x):
    return torch.cat([F.conv2d(x[:, part], m.weight[part, :2], m.bias[part], padding=1) for part in _HALVES], 1)


def _of_split(m, x):
    first, last = torch.split(F.pad(x, (1, 1, 1, 1)), [2, 2], 1)
    parts = [F.conv2d(part, m.weight[half, :2]) for part, half in zip((first, last), _HALVES, strict=True)]
    return torch.cat(parts, 1) + m.bias.view(1, -1, 1, 1)


def _with_bias(bias):
    """A convolution to whose result a function of the network and this result is added."""
    return lambda m, x: (y := F.conv2d(x, m.weight, padding=1)) + bias(m, y)


_HALVES = (slice(0, 2), slice(2, 4))


def _unfolded(m, x):
    columns = F.unfold(x, 3, padding=1)
    return (m.weight.flatten(1) @ columns + m.bias[:, None]).view(x.shape[0], 4, 8, 8)


def _unfolded_rows(m, x):
    rows = F.unfold(x, 3, padding=1).transpose(1, 2) @ m.weight.flatten(1).T + m.bias
    return rows.transpose(1, 2).reshape(x.shape[0], 4, 8, 8)


def _unfolded_batches(m, x):
    weight = m.weight.view(1, 4, -1).expand(x.shape[0], -1, -1)
    return F.fold(torch.bmm(weight, F.unfold(x, 3, padding=1)) + m.bias.view(1, 4, 1), (8, 8), 1)


def _unfolded_and_folded(m, x):
    rows = F.unfold(x, 3, padding=1).transpose(1, 2) @ m.weight.view(4, -1).t()
    return F.fold(rows.transpose(1, 2), (8, 8), (1, 1)) + m.bias.view(1, 4, 1, 1)


def _unfolded_groups(product):
    """The columns of two groups, and their weights, in a product."""

    def layer(m, x):
        columns = F.unfold(x, 3, padding=1).view(x.shape[0], 2, 18, 64)
        return product(columns, m.weight[:, :2].reshape(2, 2, 18)).reshape(x.shape[0], 4, 8, 8) + m.bias.view(1, -1, 1, 1)

    return layer


def _windows(x):
    """Windows of 3 × 3 places, by Tensor.unfold."""
    return F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)


def _of_windows(product):
    return lambda m, x: product(_windows(x), m.weight) + m.bias.view(1, -1, 1, 1)


def _of_channels(m, x):
    return F.conv2d(x, m.weight[:, :1], m.bias, padding=1, groups=4)


def _biases_of_channels(m, x):
    y = F.conv2d(x, m.weight, padding=1)
    return torch.stack([y[:, n] + m.bias[n] for n in range(4)], 1)


def _batch_norm(m, x):
    return F.batch_norm(F.conv2d(x, m.weight, padding=1), m.mean, m.variance, m.scale, m.shift, eps=0.1)


def _batch_norm_by_hand(m, x):
    x = F.conv2d(x, m.weight, padding=1)
    normalized = (x - m.mean.view(1, -1, 1, 1)) / torch.sqrt(m.variance.view(1, -1, 1, 1) + 0.1)
    return normalized * m.scale[None, :, None, None] + m.shift[None, :, None, None]


def _normalized_in_halves(parts):
    """Batch norms of the halves of a convolution's channels, which a function makes."""

    def layer(m, x):
        halves = parts(F.conv2d(x, m.weight, padding=1))
        norms = [(m.mean[half], m.variance[half], m.scale[half], m.shift[half]) for half in _HALVES]
        return torch.cat([F.batch_norm(one, *norm, eps=0.1) for one, norm in zip(halves, norms, strict=True)], 1)

    return layer


def _one_half_normalized(m, x):
    """Half of the channels has a batch norm, the other one an instance norm, as in IBN-Net."""
    y = F.conv2d(x, m.weight, padding=1)
    first, last = F.instance_norm(y[:, :2]), y[:, 2:]
    return torch.cat([first, F.batch_norm(last, m.mean[2:], m.variance[2:], m.scale[2:], m.shift[2:], eps=0.1)], 1)


def _one_half_scaled(m, x):
    factor = m.scale * torch.rsqrt(m.variance + 0.1)
    whole = torch.cat([torch.ones_like(factor[:2]), factor[2:]])
    bias = torch.cat([torch.zeros_like(factor[:2]), (m.shift - m.mean * factor)[2:]])
    y = F.conv2d(x, m.weight * whole[:, None, None, None], bias, padding=1)
    return torch.cat([F.instance_norm(y[:, :2]), y[:, 2:]], 1)


def _normalized(between):
    """A batch norm of a convolution, behind a function of its result."""
    return lambda m, x: F.batch_norm(between(F.conv2d(x, m.weight, padding=1)), m.mean, m.variance, m.scale, m.shift, eps=0.1)


#: Calls that return what they are given.
NO_OPERATIONS = {
    "to(float64)": lambda y: y.to(torch.float64),
    "double()": lambda y: y.double(),
    "type(float64)": lambda y: y.type(torch.float64),
    "type_as": lambda y: y.type_as(y),
    "to(y.dtype)": lambda y: y.to(y.dtype),
    "to(y.device)": lambda y: y.to(y.device),
    "cpu()": lambda y: y.cpu(),
    "to(memory_format)": lambda y: y.to(memory_format=torch.channels_last),
    "* 1.0": lambda y: y * 1.0,
    "/ 1": lambda y: y / 1,
    "padded by nothing": lambda y: F.pad(y, (0, 0, 0, 0)),
    "repeat(1, 1, 1, 1)": lambda y: y.repeat(1, 1, 1, 1),
}

#: Selections, permutations, repetitions and averages of places, which keep the channels.
SELECTIONS = {
    "cut": lambda y: y[:, :, 1:-1],
    "cut from the end": lambda y: y[..., :-2],
    "every second": lambda y: y[..., ::2, ::2],
    "flipped": lambda y: y.flip(-1),
    "rolled": lambda y: y.roll(1, -1),
    "turned": lambda y: y.rot90(1, (2, 3)),
    "permuted by an index": lambda y: y[:, :, torch.arange(7, -1, -1)],
    "repeated": lambda y: y.repeat(1, 1, 2, 1),
    "split": lambda y: y.split(4, -1)[0],
    "mirrored at its border": lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect"),
    "averaged": lambda y: F.avg_pool2d(y, 2),
    "averaged to a size": lambda y: F.adaptive_avg_pool2d(y, 3),
    "resized": lambda y: F.interpolate(y, scale_factor=1.5, mode="bilinear"),
}

#: Other orders of channels.
ORDERS = {
    "flipped channels": lambda y: y.flip(1),
    "shuffled channels": lambda y: F.channel_shuffle(y, 2),
    "channels shuffled by views": lambda y: y.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2),
    "channels at indices": lambda y: y[:, [2, 0, 3, 1]],
}


def _normalized_before(function):
    """A function of a convolution with a batch norm, which is the batch norm of the function."""

    def layer(m, x):
        order = function(torch.arange(4.0)[None, :, None, None]).flatten().argsort()
        norm = (m.mean[order], m.variance[order], m.scale[order], m.shift[order])
        return function(F.batch_norm(F.conv2d(x, m.weight, padding=1), *norm, eps=0.1))

    return layer


def _of_pixels(m, x):
    """Of four channels for each channel of the result, which a pixel shuffle makes of them."""
    return F.conv2d(x, torch.cat([m.weight, -m.weight, m.weight.flip(0), m.weight.flip(1)]), padding=1)


def _with_bias_behind(between):
    """A convolution and a function of its result, and the same with the bias added last."""
    return (
        lambda m, x: between(_conv(m, x)),
        lambda m, x: between(F.conv2d(x, m.weight, padding=1)) + m.bias.view(1, -1, 1, 1),
    )


IMAGES = {
    **{f"batch norm of {name}": (_batch_norm, _normalized(between)) for name, between in NO_OPERATIONS.items()},
    **{
        f"batch norm of an image {name}": (lambda m, x, select=select: select(_batch_norm(m, x)), _normalized(select))
        for name, select in SELECTIONS.items()
    },
    **{f"batch norm of {name}": (_normalized_before(function), _normalized(function)) for name, function in ORDERS.items()},
    "conv2d, pixel_shuffle, + b": (
        lambda m, x: F.pixel_shuffle(_of_pixels(m, x) + m.bias.repeat_interleave(4).view(-1, 1, 1), 2)[..., ::2, 1::2],
        lambda m, x: (F.pixel_shuffle(_of_pixels(m, x), 2) + m.bias.view(-1, 1, 1))[..., ::2, 1::2],
    ),
    "conv2d, max_pool2d, + b": _with_bias_behind(lambda y: F.max_pool2d(y, 2)),
    "conv2d, mean of places, + b": _with_bias_behind(lambda y: y.mean((2, 3), keepdim=True)),
    "batch norm with numbers as statistics": (
        lambda m, x: F.conv2d(x, m.weight * m.scale[:, None, None, None] / 2, m.shift, padding=1),
        lambda m, x: F.batch_norm(
            F.conv2d(x, m.weight, padding=1), x.new_zeros(4), torch.ones_like(m.variance), m.scale, m.shift, eps=3
        ),
    ),
    "halves normalized apart": (_batch_norm, _normalized_in_halves(lambda y: (y[:, :2], y[:, 2:]))),
    "parts of a split, normalized apart": (
        _batch_norm,
        _normalized_in_halves(lambda y: ((parts := torch.split(y, [2, 2], 1))[0], parts[1])),
    ),
    "one half normalized": (_one_half_scaled, _one_half_normalized),
    "conv_transpose2d, a term for each half": (
        lambda m, x: F.conv_transpose2d(x, m.weight, m.bias),
        lambda m, x: torch.cat(
            [(y := F.conv_transpose2d(x, m.weight))[:, :2] + m.bias[:2, None, None], y[:, 2:] + m.bias[2:, None, None]], 1
        ),
    ),
    "conv2d.to(x.dtype) + b": _with_bias_behind(NO_OPERATIONS["to(y.dtype)"]),
    "conv2d.to(memory_format) + b": _with_bias_behind(NO_OPERATIONS["to(memory_format)"]),
    "conv2d, cut, + b": _with_bias_behind(SELECTIONS["cut"]),
    "conv2d, every second, + b": _with_bias_behind(SELECTIONS["every second"]),
    "pad, to(x.dtype), then conv2d": (
        _conv,
        lambda m, x: F.conv2d(F.pad(x, (1, 1, 1, 1)).to(x.dtype), m.weight, m.bias),
    ),
    "pad of channels last, permute, then conv2d": (
        _conv,
        lambda m, x: F.conv2d(F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).permute(0, 3, 1, 2), m.weight, m.bias),
    ),
    "pad before and after a ReLU, then conv2d": (
        lambda m, x: _conv(m, torch.relu(x)),
        lambda m, x: F.conv2d(F.pad(torch.relu(F.pad(x, (1, 1))), (0, 0, 1, 1)), m.weight, m.bias),
    ),
    "conv_transpose2d, cut, + b": (
        lambda m, x: F.conv_transpose2d(x, m.weight, m.bias)[:, :, 1:-1, 1:-1],
        lambda m, x: F.conv_transpose2d(x, m.weight)[:, :, 1:-1, 1:-1] + m.bias.view(-1, 1, 1),
    ),
    "conv2d + b": (_conv, lambda m, x: F.conv2d(x, m.weight, padding=1) + m.bias.view(1, -1, 1, 1)),
    "conv2d + b, in three dimensions": (_conv, lambda m, x: m.bias[:, None, None] + F.conv2d(x, m.weight, padding=1)),
    "conv2d * scale + shift": (
        lambda m, x: F.conv2d(x, m.weight * m.scale[:, None, None, None], m.shift, padding=1),
        lambda m, x: F.conv2d(x, m.weight, padding=1) * m.scale.view(-1, 1, 1) + m.shift.view(-1, 1, 1),
    ),
    "conv2d + expanded b": (
        _conv,
        lambda m, x: F.conv2d(x, m.weight, padding=1) + m.bias.view(-1, 1, 1).expand(x.shape[0], -1, 8, 8),
    ),
    "conv2d + b.view(1, y.shape[1], 1, 1)": (_conv, _with_bias(lambda m, y: m.bias.view(1, y.shape[1], 1, 1))),
    "conv2d + conv2d(ones, b)": (
        _conv,
        _with_bias(lambda m, y: F.conv2d(torch.ones_like(y[:, :1]), m.bias.view(4, 1, 1, 1))),
    ),
    "conv2d + conv2d(zeros, W, b)": (
        _conv,
        lambda m, x: F.conv2d(x, m.weight, padding=1) + F.conv2d(torch.zeros_like(x), m.weight, m.bias, padding=1),
    ),
    "conv2d + b.repeat_interleave.repeat.view(sizes)": (
        _conv,
        _with_bias(lambda m, y: m.bias.repeat_interleave(y.shape[2] * y.shape[3]).repeat(y.shape[0]).view(y.shape)),
    ),
    "conv2d + b.repeat_interleave.view(fixed sizes)": (
        _conv,
        _with_bias(lambda m, y: m.bias.repeat_interleave(64).view(4, 8, 8)),
    ),
    "conv2d + repeated b with new dimensions": (
        _conv,
        _with_bias(lambda m, y: m.bias.repeat(y.shape[0], 1)[:, :, None, None]),
    ),
    "conv2d + stack([b] * n)": (_conv, _with_bias(lambda m, y: torch.stack([m.bias] * 2)[:, :, None, None])),
    "conv2d + cat([b[None]] * n)": (_conv, _with_bias(lambda m, y: torch.cat([m.bias[None]] * 2)[..., None, None])),
    "conv2d + expanded and permuted b": (
        _conv,
        _with_bias(lambda m, y: m.bias.expand(y.shape[0], 8, 8, 4).permute(0, 3, 1, 2)),
    ),
    "conv2d + zeros + b": (
        _conv,
        lambda m, x: (y := F.conv2d(x, m.weight, padding=1)) + torch.zeros(y.shape, dtype=y.dtype) + m.bias.view(1, -1, 1, 1),
    ),
    "conv2d, permuted, + b": (
        _conv,
        lambda m, x: (F.conv2d(x, m.weight, padding=1).permute(0, 2, 3, 1) + m.bias).permute(0, 3, 1, 2),
    ),
    "unfold, @, fold + b": (_conv, _unfolded_and_folded),
    "conv2d + b, expanded for one sample": (
        _conv,
        lambda m, x: F.conv2d(x, m.weight, padding=1) + m.bias.view(1, -1, 1, 1).expand(1, -1, 8, 8),
    ),
    "conv2d, permuted by einsum, + b": (
        _conv,
        lambda m, x: (torch.einsum("bchw->bhwc", F.conv2d(x, m.weight, padding=1)) + m.bias).permute(0, 3, 1, 2),
    ),
    "torch.convolution": (
        _conv,
        lambda m, x: torch.convolution(x, m.weight, m.bias, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    ),
    "batch norm by hand": (_batch_norm, _batch_norm_by_hand),
    "instance norm with running statistics": (
        _batch_norm,
        lambda m, x: F.instance_norm(
            F.conv2d(x, m.weight, padding=1), m.mean, m.variance, m.scale, m.shift, use_input_stats=False, eps=0.1
        ),
    ),
    "pad, then conv2d": (_conv, _padded),
    "ZeroPad2d, then conv2d": (_conv, lambda m, x: F.conv2d(nn.ZeroPad2d(1)(x), m.weight, m.bias)),
    "padded twice": (_conv, lambda m, x: F.conv2d(F.pad(F.pad(x, (1, 1)), (0, 0, 1, 1)), m.weight, m.bias)),
    "pad, then padded conv2d": (
        lambda m, x: F.conv2d(x, m.weight, m.bias, padding=(2, 1))[:, :, 1:-1],
        lambda m, x: F.conv2d(F.pad(x, (0, 0, 1, 1)), m.weight, m.bias, padding=1)[:, :, 1:-1],
    ),
    "pad on one side, then conv2d": (
        lambda m, x: F.conv2d(x, m.weight[..., :2, 1:], m.bias, padding="same"),
        lambda m, x: F.conv2d(F.pad(x, (0, 1, 0, 1)), m.weight[..., :2, 1:], m.bias),
    ),
    "conv_transpose2d * scale + b": (
        lambda m, x: F.conv_transpose2d(x, m.weight * m.scale[:, None, None], m.bias, padding=1),
        lambda m, x: F.conv_transpose2d(x, m.weight, padding=1) * m.scale.view(-1, 1, 1) + m.bias.view(-1, 1, 1),
    ),
    "two halves of conv2d under cat": (
        _conv,
        lambda m, x: torch.cat(
            [F.conv2d(x, m.weight[part], m.bias[part], padding=1) for part in (slice(0, 2), slice(2, 4))], 1
        ),
    ),
    "conv2d.masked_fill(mask of channels, 2) * scale": (
        lambda m, x: _conv(m, x, m.kept * m.scale, (m.bias * m.kept + 2 * (1 - m.kept.double())) * m.scale),
        lambda m, x: (
            _conv(m, x).masked_fill(~m.kept.view(1, -1, 1, 1).expand(x.shape[0], -1, 8, 8), 2.0) * m.scale.view(-1, 1, 1)
        ),
    ),
    "a bias for each conv2d[:, n]": (
        _conv,
        _biases_of_channels,
    ),
    "conv2d of parts that are padded alike": (
        _conv,
        lambda m, x: F.conv2d(torch.cat([F.pad(x[:, part], (1, 1, 1, 1)) for part in _HALVES], 1), m.weight, m.bias),
    ),
    "conv2d.index_fill": (
        lambda m, x: _conv(m, x, m.kept, m.bias * m.kept + 2 * (1 - m.kept.double())),
        lambda m, x: _conv(m, x).index_fill(1, torch.tensor([1]), 2.0),
    ),
    "conv2d * mask of channels + 2 * other mask": (
        lambda m, x: _conv(m, x, m.kept, m.bias * m.kept + 2 * (1 - m.kept.double())),
        lambda m, x: _conv(m, x) * m.kept[:, None, None] + 2.0 * (~m.kept).view(-1, 1, 1),
    ),
    "y[:, mask of channels] = 2": (
        lambda m, x: _conv(m, x, m.kept, m.bias * m.kept + 2 * (1 - m.kept.double())),
        _channels_written,
    ),
    "zeros among the channels": (
        _conv,
        lambda m, x: F.conv2d(
            torch.cat([x, torch.zeros_like(x[:, :1])], 1), torch.cat([m.weight, m.weight[:, :1]], 1), m.bias, padding=1
        ),
    ),
    "a parameter among the channels": (
        lambda m, x: F.conv2d(x, m.weight, (m.weight.sum((2, 3)) * m.shift).sum(1)),
        lambda m, x: F.conv2d(
            torch.cat([m.shift.view(1, 4, 1, 1).expand(x.shape[0], -1, *x.shape[2:]), x], 1), torch.cat([m.weight] * 2, 1)
        ),
    ),
    "conv2d, then a convolution of each place and channel": (
        lambda m, x: F.conv2d(x, m.weight * m.scale[:, None, None, None], m.bias * m.scale + m.shift, padding=1),
        lambda m, x: F.conv2d(_conv(m, x), m.scale.view(4, 1, 1, 1), m.shift, groups=4),
    ),
    "two halves of conv2d under stack and flatten": (
        _conv,
        lambda m, x: (
            torch.stack([F.conv2d(x, m.weight[part], padding=1) for part in _HALVES], 1).flatten(1, 2)
            + m.bias.view(1, -1, 1, 1)
        ),
    ),
    "slices of conv2d under cat": (_grouped, _of_slices),
    "parts of a split by conv2d under cat": (_grouped, _of_split),
    "each channel by conv2d under cat": (
        lambda m, x: F.conv2d(x, m.weight[:, :1], m.bias, padding=1, groups=4),
        lambda m, x: torch.cat(
            [
                F.conv2d(x[:, place : place + 1], m.weight[place, None, :1], m.bias[place, None], padding=1)
                for place in range(4)
            ],
            1,
        ),
    ),
    "zeros by cat, then conv2d": (_conv, _between_zeros),
    "zeros of a fixed size by cat, then conv2d": (
        _conv,
        lambda m, x: F.conv2d(
            torch.cat([zeros := torch.zeros(2, 4, 1, 8, dtype=torch.double), x, zeros], 2), m.weight, m.bias, padding=(0, 1)
        ),
    ),
    "written between zeros": (_conv, _written_between_zeros),
    "unfold": (_conv, _unfolded),
    "unfold, then linear": (_conv, _unfolded_rows),
    "unfold, bmm of an expanded weight": (_conv, _unfolded_batches),
    "unfold, bmm of a repeated weight": (
        _conv,
        lambda m, x: (
            torch.bmm(m.weight.view(1, 4, 36).repeat(x.shape[0], 1, 1), F.unfold(x, 3, padding=1)).view(-1, 4, 8, 8)
            + m.bias.view(1, 4, 1, 1)
        ),
    ),
    "unfold, einsum of groups": (_grouped, _unfolded_groups(lambda x, weight: torch.einsum("bgkl,gok->bgol", x, weight))),
    "unfold, W of groups @": (_grouped, _unfolded_groups(lambda x, weight: weight @ x)),
    "unfold, sum of products of each channel": (
        _of_channels,
        lambda m, x: (
            (F.unfold(x, 3, padding=1).view(x.shape[0], 4, 9, 64) * m.weight[:, 0].reshape(1, 4, 9, 1)).sum(2).view(x.shape)
            + m.bias.view(1, -1, 1, 1)
        ),
    ),
    "Tensor.unfold, einsum": (_conv, _of_windows(lambda x, weight: torch.einsum("bchwij,ocij->bohw", x, weight))),
    "Tensor.unfold, einsum of a permuted weight": (
        _conv,
        _of_windows(lambda x, weight: torch.einsum("bchwij,ijco->bohw", x, weight.permute(2, 3, 1, 0))),
    ),
    "Tensor.unfold, tensordot": (
        _conv,
        _of_windows(lambda x, weight: torch.tensordot(x, weight, ([1, 4, 5], [1, 2, 3])).permute(0, 3, 1, 2)),
    ),
    "Tensor.unfold, einsum of each channel": (
        _of_channels,
        _of_windows(lambda x, weight: torch.einsum("bchwij,cij->bchw", x, weight[:, 0])),
    ),
    "Tensor.unfold with steps, einsum": (
        lambda m, x: F.conv2d(x, m.weight[..., :2, :2], m.bias, stride=2).repeat_interleave(2, 2).repeat_interleave(2, 3),
        lambda m, x: (
            (
                torch.einsum("bchwij,ocij->bohw", x.unfold(2, 2, 2).unfold(3, 2, 2), m.weight[..., :2, :2])
                + m.bias.view(1, -1, 1, 1)
            )
            .repeat_interleave(2, 2)
            .repeat_interleave(2, 3)
        ),
    ),
    "unfold, F.linear of its rows": (
        _conv,
        lambda m, x: F.linear(F.unfold(x, 3, padding=1).mT, m.weight.flatten(1), m.bias).mT.reshape(x.shape[0], 4, 8, 8),
    ),
}

# --- softmaxes ----------------------------------------------------------------------------------------------------------------


def _softmax(m, x):
    return torch.softmax(x, -1)


def _exp_by_sum(m, x):
    weights = torch.exp(x)
    return weights / weights.sum(-1, keepdim=True)


def _minus_amax(m, x):
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _minus_detached(m, x):
    weights = (x - x.max(dim=-1, keepdim=True).values.detach()).exp()
    return weights / weights.sum(dim=-1)[..., None]


def _times_reciprocal(m, x):
    weights = torch.exp(x)
    return weights * weights.sum(-1, keepdim=True).reciprocal()


def _stabilized(m, x):
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / (weights.sum(-1, keepdim=True) + 1e-12)


def _masked(m, x):
    return torch.softmax(x.masked_fill(m.allowed == 0, -torch.inf), -1)


def _masked_by_product(m, x):
    weights = torch.exp(x) * m.allowed
    return weights / weights.sum(-1, keepdim=True)


def _masked_by_fill(m, x):
    weights = torch.exp(x - x.amax(-1, keepdim=True)).masked_fill(m.allowed == 0, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _masked_before(m, x):
    weights = torch.exp(x.masked_fill(m.allowed == 0, -torch.inf))
    return weights / weights.sum(-1, keepdim=True)


def _masked_by_sum(m, x):
    x = x + torch.log(m.allowed)
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))


def _in_base_two(m, x):
    weights = torch.exp2(x / 0.6931471805599453)
    return weights / weights.sum(-1, keepdim=True)


def _weigh(m, given):
    scores, values = given
    return torch.softmax(scores, -1) @ values


def _divided_last(m, given):
    scores, values = given
    weights = torch.exp(scores)
    return (weights @ values) / weights.sum(-1, keepdim=True)


def _einsum_divided_last(m, given):
    scores, values = given
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("bqk,bkd->bqd", weights, values) / weights.sum(-1)[:, :, None]


def _pool(m, given):
    scores, values = given
    return (torch.softmax(scores, 1) * values).sum(1)


def _pooled_by_hand(m, given):
    scores, values = given
    weights = scores.exp()
    return (weights * values).sum(1) / weights.sum(1)


def _over_places(m, x):
    return torch.softmax(x.flatten(2), -1).unflatten(2, (4, 4))


def _over_places_by_hand(m, x):
    weights = torch.exp(x)
    return weights / weights.sum((2, 3), keepdim=True)


def _by_groups(m, scores):
    """The softmax of each group, with a matrix of groups and entries."""
    member = m.target == torch.arange(5)[:, None]
    return torch.softmax(scores.expand(5, -1).masked_fill(~member, -torch.inf), 1).gather(0, m.target[None])[0]


def _by_index_add(m, scores):
    weights = scores.exp()
    return weights / weights.new_zeros(5).index_add(0, m.target, weights)[m.target]


def _by_scatter_add(m, scores):
    weights = torch.exp(scores - scores.max())
    sums = torch.zeros(5, dtype=weights.dtype).scatter_add(0, m.target, weights)
    return weights / sums.gather(0, m.target)


def _by_scatter_reduce(m, scores):
    largest = scores.new_zeros(5).scatter_reduce(0, m.target, scores.detach(), "amax", include_self=False)
    weights = (scores - largest.index_select(0, m.target)).exp()
    sums = weights.new_zeros(5).scatter_reduce(0, m.target, weights, "sum") + 1e-16
    return weights / sums.index_select(0, m.target)


def _of_geometric(m, scores):
    """As PyTorch Geometric computes it, with an index for each entry of a column."""
    scores = scores[:, None]
    index = m.target.view(-1, 1).expand_as(scores)
    largest = scores.new_zeros(5, 1).scatter_reduce_(0, index, scores.detach(), "amax", include_self=False)
    weights = (scores - largest.index_select(0, m.target)).exp()
    sums = weights.new_zeros(5, 1).scatter_add_(0, index, weights) + 1e-16
    return (weights / sums.index_select(0, m.target))[:, 0]


def _renormalized(m, x):
    weights = torch.softmax(x, -1) * m.allowed
    return weights / weights.sum(-1, keepdim=True)


def _sharpened(power):
    def layer(m, x):
        weights = power(torch.softmax(x, -1))
        return weights / weights.sum(-1, keepdim=True)

    return layer


def _triangle(m, x):
    weights = x.exp().tril()
    return weights / weights.sum(-1, keepdim=True)


def _stable_logarithm(m, x):
    shifted = x - x.max(-1, keepdim=True).values.detach()
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def _masked_by_where(m, x):
    weights = torch.where(m.allowed > 0, x.exp(), torch.zeros_like(x))
    return weights / weights.sum(-1, keepdim=True)


SOFTMAXES = {
    "softmax * mask, normalized again": (_masked, _renormalized),
    "exp.tril()": (_masked, _triangle),
    "softmax.tril(), normalized again": (_masked, lambda m, x: F.normalize(torch.softmax(x, -1).tril(), p=1, dim=-1)),
    "_softmax": (_softmax, lambda m, x: torch._softmax(x, -1, False)),
    "masked by where": (_masked, _masked_by_where),
    "exp / sum": (_softmax, _exp_by_sum),
    "exp / exp.sum, computed twice": (_softmax, lambda m, x: x.exp() / x.exp().sum(-1, keepdim=True)),
    "minus amax": (_softmax, _minus_amax),
    "minus detached max": (_softmax, _minus_detached),
    "softmax minus amax": (_softmax, lambda m, x: torch.softmax(x - x.amax(-1, keepdim=True), -1)),
    "softmax minus logsumexp": (_softmax, lambda m, x: torch.softmax(x - x.logsumexp(-1, keepdim=True), -1)),
    "softmax of log_softmax / 2": (
        lambda m, x: torch.softmax(x / 2, -1),
        lambda m, x: (F.log_softmax(x, -1) / 2).softmax(-1),
    ),
    "softmax of 3 * (x - mean)": (
        lambda m, x: torch.softmax(3 * x, -1),
        lambda m, x: (m.query.weight.new_tensor([3.0]) * (x - x.mean(-1, keepdim=True))).softmax(-1),
    ),
    "softmax of log_softmax": (_softmax, lambda m, x: F.log_softmax(x, -1).softmax(-1)),
    "minus logsumexp": (_softmax, lambda m, x: torch.exp(x - torch.logsumexp(x, -1, keepdim=True))),
    "minus log of sum": (_softmax, lambda m, x: (x - x.exp().sum(-1, keepdim=True).log()).exp()),
    "exp of log_softmax": (_softmax, lambda m, x: F.log_softmax(x, -1).exp()),
    "softmax ** 2 / sum": (lambda m, x: torch.softmax(2 * x, -1), _sharpened(lambda weights: weights**2)),
    "softmax.sqrt() / sum": (lambda m, x: torch.softmax(x / 2, -1), _sharpened(torch.sqrt)),
    "times reciprocal": (_softmax, _times_reciprocal),
    "times 1 / sum": (_softmax, lambda m, x: x.exp() * (1 / x.exp().sum(-1, keepdim=True))),
    "sum plus epsilon": (_softmax, _stabilized),
    "normalize, p=1": (_softmax, lambda m, x: F.normalize(x.exp(), p=1, dim=-1)),
    "2 ** x": (_softmax, _in_base_two),
    "temperature": (lambda m, x: torch.softmax(x / 0.3, -1), lambda m, x: _minus_amax(m, x / 0.3)),
    "over the second dimension": (
        lambda m, x: torch.softmax(x, 1),
        lambda m, x: torch.exp(x) / torch.exp(x).sum(1, keepdim=True),
    ),
    "1 / (1 + exp(-x))": (lambda m, x: torch.sigmoid(x), lambda m, x: 1 / (1 + torch.exp(-x))),
    "exp / (exp + 1)": (lambda m, x: torch.sigmoid(x), lambda m, x: x.exp() / (x.exp() + 1)),
    "log(1 + exp)": (lambda m, x: F.softplus(x), lambda m, x: torch.log(1 + torch.exp(x))),
    "log of sigmoid": (lambda m, x: F.logsigmoid(x), lambda m, x: x.sigmoid().log()),
    "x - max - log of sum": (lambda m, x: F.log_softmax(x, -1), _stable_logarithm),
    "log of softmax": (lambda m, x: F.log_softmax(x, -1), lambda m, x: x.softmax(-1).log()),
    "masked by a product": (_masked, _masked_by_product),
    "masked by masked_fill": (_masked, _masked_by_fill),
    "masked before": (_masked, _masked_before),
    "masked by a sum": (_masked, _masked_by_sum),
}

# --- recurrent layers -------------------------------------------------------------------------------------------------------


def _named(name):
    return lambda m, x: getattr(m, name)(x)[0][:, -1]


def _steps(x):
    return [x[:, step] for step in range(5)]


def _from_both(module, x, hidden):
    """The affine functions of an input and of a hidden state."""
    return (
        F.linear(x, module.weight_ih_l0, module.bias_ih_l0),
        F.linear(hidden, module.weight_hh_l0, module.bias_hh_l0),
    )


def _lstm(m, x):
    hidden = cell = x.new_zeros(x.shape[0], 6)
    for step in _steps(x):
        enter, keep, candidate, out = sum(_from_both(m.lstm, step, hidden)).chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
        hidden = torch.sigmoid(out) * torch.tanh(cell)
    return hidden


def _lstm_from_nothing(m, x):
    """Without a first state, its gates in one sigmoid, and its products by methods."""
    weight = torch.cat([m.lstm.weight_ih_l0, m.lstm.weight_hh_l0], 1)
    bias, hidden, cell = m.lstm.bias_ih_l0 + m.lstm.bias_hh_l0, None, None
    for step in range(5):
        if hidden is None:
            scores = x[:, step] @ m.lstm.weight_ih_l0.T + bias
        else:
            scores = torch.cat([x[:, step], hidden], 1) @ weight.T + bias
        gates, candidate = torch.sigmoid(scores), scores[:, 12:18].tanh()
        entering = candidate * gates[:, :6]
        cell = entering if cell is None else torch.addcmul(entering, gates[:, 6:12], cell)
        hidden = cell.tanh().mul(gates[:, 18:])
    return hidden


def _gru(state):
    """`state`: of the candidate, the gate and the state before."""

    def layer(m, x):
        hidden = x.new_zeros(x.shape[0], 6)
        for step in _steps(x):
            given, before = (one.chunk(3, -1) for one in _from_both(m.gru, step, hidden))
            reset, gate = (torch.sigmoid(given[at] + before[at]) for at in (0, 1))
            hidden = state(torch.tanh(given[2] + reset * before[2]), gate, hidden)
        return hidden

    return layer


def _rnn(m, x):
    hidden = x.new_zeros(x.shape[0], 6)
    for step in _steps(x):
        hidden = torch.tanh(sum(_from_both(m.rnn, step, hidden)))
    return hidden


SERIES = {
    "LSTM, step by step": (_named("lstm"), _lstm),
    "LSTM from nothing": (_named("lstm"), _lstm_from_nothing),
    "GRU, step by step": (_named("gru"), _gru(lambda new, gate, old: (1 - gate) * new + gate * old)),
    "GRU, gate * (old - new)": (_named("gru"), _gru(lambda new, gate, old: new + gate * (old - new))),
    "GRU, (1 - gate) * (new - old)": (_named("gru"), _gru(lambda new, gate, old: old + (1 - gate) * (new - old))),
    "GRU, new - gate * new + gate * old": (_named("gru"), _gru(lambda new, gate, old: new - gate * new + gate * old)),
    "GRU, (ones - gate) * new + gate * old": (
        _named("gru"),
        _gru(lambda new, gate, old: (torch.ones_like(gate) - gate) * new + gate * old),
    ),
    "GRU, u * new + (1 - u) * old": (
        _named("gru"),
        _gru(lambda new, gate, old: (u := 1 - gate) * new + (1 - u) * old),
    ),
    "GRU, old - (1 - gate) * (old - new)": (_named("gru"), _gru(lambda new, gate, old: old - (1 - gate) * (old - new))),
    "GRU by lerp": (_named("gru"), _gru(lambda new, gate, old: torch.lerp(new, old, gate))),
    "RNN, step by step": (_named("rnn"), _rnn),
}

ACTIVATIONS = {
    "(1 + tanh(x / 2)) / 2": (lambda m, x: torch.sigmoid(x), lambda m, x: 0.5 * (1 + torch.tanh(x / 2))),
    "1 - sigmoid(-x)": (lambda m, x: torch.sigmoid(x), lambda m, x: 1 - torch.sigmoid(-x)),
    "(1 + exp(-x)) ** -1": (lambda m, x: torch.sigmoid(x), lambda m, x: (1 + torch.exp(-x)) ** -1),
    "2 * sigmoid(2 * x) - 1": (lambda m, x: torch.tanh(x), lambda m, x: 2 * torch.sigmoid(2 * x) - 1),
    "log(1 + exp(x))": (lambda m, x: F.softplus(x), lambda m, x: torch.log(1 + torch.exp(x))),
    "log1p(exp(x))": (lambda m, x: F.softplus(x), lambda m, x: torch.log1p(torch.exp(x))),
    "exp(logsigmoid(x))": (lambda m, x: torch.sigmoid(x), lambda m, x: F.logsigmoid(x).exp()),
    "sign(x) * relu(|x| - 0.3)": (lambda m, x: F.softshrink(x, 0.3), lambda m, x: torch.sign(x) * torch.relu(x.abs() - 0.3)),
    "logsumexp of a stack of x and 0": (
        lambda m, x: F.softplus(x),
        lambda m, x: torch.logsumexp(torch.stack([x, torch.zeros_like(x)], -1), -1),
    ),
    "logaddexp(x, 0)": (lambda m, x: F.softplus(x), lambda m, x: torch.logaddexp(x, torch.zeros_like(x))),
    "max(x, 0) + min(exp(x) - 1, 0)": (
        lambda m, x: F.elu(x),
        lambda m, x: torch.maximum(x, torch.zeros_like(x)) + torch.minimum(torch.exp(x) - 1, torch.zeros_like(x)),
    ),
    "where(x > 0, x, exp(x) - 1)": (lambda m, x: F.elu(x), lambda m, x: torch.where(x > 0, x, torch.exp(x) - 1)),
    "relu6(x + 3) / 6": (lambda m, x: F.hardsigmoid(x), lambda m, x: F.relu6(x + 3) / 6),
    "x * relu6(x + 3) / 6": (lambda m, x: F.hardswish(x), lambda m, x: x * F.relu6(x + 3) / 6),
    "relu(x + 1) - relu(x - 1) - 1": (lambda m, x: F.hardtanh(x), lambda m, x: torch.relu(x + 1) - torch.relu(x - 1) - 1),
    "relu(x) - 0.1 * relu(-x)": (lambda m, x: F.leaky_relu(x, 0.1), lambda m, x: torch.relu(x) - 0.1 * torch.relu(-x)),
    "where(x > 0, x, 0.1 * x)": (lambda m, x: F.leaky_relu(x, 0.1), lambda m, x: torch.where(x > 0, x, 0.1 * x)),
    "minimum(maximum(x, -1), 1)": (
        lambda m, x: F.hardtanh(x),
        lambda m, x: torch.minimum(torch.maximum(x, -torch.ones(())), torch.ones(())),
    ),
    "x * mean(x ** 2) ** -0.5": (
        lambda m, x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
        lambda m, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5,
    ),
    "x / (1 + exp(-x))": (lambda m, x: F.silu(x), lambda m, x: x / (1 + torch.exp(-x))),
    "x * ndtr(x)": (lambda m, x: F.gelu(x), lambda m, x: x * torch.special.ndtr(x)),
}

# --- gates and weighted values ----------------------------------------------------------------------------------------------


def _gated(m, given):
    return given[1] * torch.sigmoid(given[0].mean(-1, keepdim=True))


def _activated(m, given):
    return given[1] * F.silu(given[0].mean(-1, keepdim=True))


def _gated_activation(m, given):
    value = given[0].mean(-1, keepdim=True)
    return given[1] * value * torch.sigmoid(value)


def _activated_gate(m, given):
    value = given[0].mean(-1, keepdim=True)
    return torch.sigmoid(value) * given[1] * value


def _rectified(m, given):
    return given[1] * F.relu(given[0].mean(-1, keepdim=True))


def _leaky(m, given):
    return given[1] * F.leaky_relu(given[0].mean(-1, keepdim=True), 0.1)


def _masked_product(mask):
    """The product of the values, an average and a function of it, in this order."""

    def layer(m, given):
        value = given[0].mean(-1, keepdim=True)
        return given[1] * value * mask(value)

    return layer


def _selected_product(select):
    """The product of the values and an average, in the places that a function of both selects."""

    def layer(m, given):
        value = given[0].mean(-1, keepdim=True)
        return select(given[1] * value, value)

    return layer


def _part_by_part(m, given):
    weights, values = torch.softmax(given[0], -1), given[1]
    return sum(weights[..., place, None] * values[:, place, None] for place in range(5))


def _by_rows(m, given):
    """Attention along edges, as a matrix of targets and edges."""
    scores, values = given
    member = m.target == torch.arange(5)[:, None]
    return torch.softmax(scores.expand(5, -1).masked_fill(~member, -torch.inf), 1) @ values[m.source]


def _along_edges(m, given):
    scores, values = given
    return torch.zeros_like(values).index_add(0, m.target, _by_index_add(m, scores)[:, None] * values[m.source])


def _joined_by_matrix(product):
    """The same with a product of the matrix of groups and the messages."""

    def layer(m, given):
        scores, values = given
        matrix = F.one_hot(m.target, 5).to(values.dtype).T
        return product(matrix, _by_index_add(m, scores)[:, None] * values[m.source])

    return layer


def _scattered_along_edges(m, given):
    scores, values = given
    messages = values.index_select(0, m.source) * _by_index_add(m, scores).view(-1, 1)
    return torch.zeros_like(values).scatter_add(0, m.target[:, None].expand(-1, 6), messages)


def _scattered_like_messages(m, given):
    """The same with zeros and an index in the shape of the messages."""
    scores, values = given
    messages = values[m.source] * _by_index_add(m, scores)[:, None]
    zeros = messages.new_zeros(5, messages.size(1))
    return zeros.scatter_add_(0, m.target.view(-1, 1).expand_as(messages), messages)


def _products(given):
    return torch.softmax(given[0], -1)[..., None] * given[1][:, None]


def _summed_and_viewed(m, given):
    products = _products(given)
    return products.sum(2).view(products.size(0), -1, products.size(-1)).to(products.dtype)


def _summed_in_parts(m, given):
    first, second, third, fourth, last = _products(given).unbind(2)
    return first + second + third + fourth + last


def _summed_as_stack(m, given):
    weights, values = torch.softmax(given[0], -1), given[1]
    return torch.stack([weights[..., place, None] * values[:, place, None] for place in range(5)]).sum(0)


GATES = {
    "gate by einsum": (_gated, lambda m, given: torch.einsum("bqd,bq->bqd", given[1], torch.sigmoid(given[0].mean(-1)))),
    "scaled by an einsum of three": (
        lambda m, given: (torch.softmax(given[0], -1) @ given[1]) * torch.sigmoid(given[0].mean(-1, keepdim=True)),
        lambda m, given: torch.einsum(
            "bqk,bkd,bq->bqd", torch.softmax(given[0], -1), given[1], torch.sigmoid(given[0].mean(-1))
        ),
    ),
    "gate by stack.prod": (
        _gated,
        lambda m, given: torch.stack([given[1], torch.sigmoid(given[0].mean(-1, keepdim=True)).expand_as(given[1])]).prod(0),
    ),
    "diag_embed(gate) @ v": (_gated, lambda m, given: torch.diag_embed(torch.sigmoid(given[0].mean(-1))) @ given[1]),
    "v * x * sigmoid(x)": (_activated, _gated_activation),
    "sigmoid(x) * v * x": (_activated, _activated_gate),
    "v * x * sigmoid(parameter * x)": (
        lambda m, given: given[1] * ((value := given[0].mean(-1, keepdim=True)) * torch.sigmoid(m.query.bias[0] * value)),
        lambda m, given: given[1] * (value := given[0].mean(-1, keepdim=True)) * torch.sigmoid(m.query.bias[0] * value),
    ),
    "v * x / (1 + exp(-x))": (
        _activated,
        lambda m, given: given[1] * (value := given[0].mean(-1, keepdim=True)) / (1 + torch.exp(-value)),
    ),
    "v * x * (x > 0)": (_rectified, _masked_product(lambda value: value > 0)),
    "v * x * (x > 0).to(x.dtype)": (_rectified, _masked_product(lambda value: (value > 0).to(value.dtype))),
    "where(x > 0, v * x, 0)": (_rectified, _selected_product(lambda product, value: torch.where(value > 0, product, 0.0))),
    "(v * x).masked_fill(x <= 0, 0)": (
        _rectified,
        _selected_product(lambda product, value: product.masked_fill(value <= 0, 0)),
    ),
    "where(x > 0, v, 0) * x": (
        _rectified,
        lambda m, given: torch.where((value := given[0].mean(-1, keepdim=True)) > 0, given[1], 0.0) * value,
    ),
    "where(x > 0, v * x, torch.tensor(0))": (
        _rectified,
        _selected_product(lambda product, value: torch.where(value > 0, product, torch.tensor(0.0))),
    ),
    "where(x > 0, v * x, 0 * v * x)": (
        _rectified,
        _selected_product(lambda product, value: torch.where(value > 0, product, 0 * product)),
    ),
    "v * x * heaviside(x, new_zeros(1))": (
        _rectified,
        _masked_product(lambda value: torch.heaviside(value, value.new_zeros(1))),
    ),
    "v * x * (x > 0).type_as(x)": (_rectified, _masked_product(lambda value: (value > 0).type_as(value))),
    "v * x * (1 + sign(x)) / 2": (_rectified, _masked_product(lambda value: (1 + torch.sign(value)) / 2)),
    "v * (x + |x|) / 2": (
        _rectified,
        lambda m, given: given[1] * ((value := given[0].mean(-1, keepdim=True)) + value.abs()) / 2,
    ),
    "v * max(x, torch.tensor(0))": (
        _rectified,
        lambda m, given: given[1] * torch.max(given[0].mean(-1, keepdim=True), torch.tensor(0.0).to(given[1].dtype)),
    ),
    "v * x * where(x > 0, 1, 0.1)": (_leaky, _masked_product(lambda value: torch.where(value > 0, 1.0, 0.1))),
    "v * x * where(x > 0, ones, 0.1 * ones)": (
        _leaky,
        _masked_product(lambda value: torch.where(value > 0, (ones := torch.ones_like(value)), 0.1 * ones)),
    ),
    "where(x > 0, v * x, 0.1 * v * x)": (
        _leaky,
        _selected_product(lambda product, value: torch.where(value > 0, product, 0.1 * product)),
    ),
    "where(x > 0, v * x, v * (exp(x) - 1))": (
        lambda m, given: given[1] * F.elu(given[0].mean(-1, keepdim=True)),
        lambda m, given: torch.where(
            (value := given[0].mean(-1, keepdim=True)) > 0, given[1] * value, given[1] * (value.exp() - 1)
        ),
    ),
    "v * x / (1 + |x|)": (
        lambda m, given: given[1] * F.softsign(given[0].mean(-1, keepdim=True)),
        lambda m, given: given[1] * (value := given[0].mean(-1, keepdim=True)) / (1 + value.abs()),
    ),
    "v * x * 0.5 * (1 + erf(x / sqrt(2)))": (
        lambda m, given: given[1] * F.gelu(given[0].mean(-1, keepdim=True)),
        _masked_product(lambda value: 0.5 * (1 + torch.erf(value / 2**0.5))),
    ),
    "0.5 * v * x * erfc(-x / sqrt(2))": (
        lambda m, given: given[1] * F.gelu(given[0].mean(-1, keepdim=True)),
        lambda m, given: 0.5 * _masked_product(lambda value: torch.erfc(-value / 2**0.5))(m, given),
    ),
    "(x * v).prod of a stack with sigmoid(x)": (
        _activated,
        lambda m, given: torch.stack(
            [(value := given[0].mean(-1, keepdim=True).expand_as(given[1])), given[1], torch.sigmoid(value)]
        ).prod(0),
    ),
    "einsum of v, x and sigmoid(x)": (
        _activated,
        lambda m, given: torch.einsum("bqd,bq,bq->bqd", given[1], (value := given[0].mean(-1)), torch.sigmoid(value)),
    ),
    "glu(cat([v * x, x]))": (
        _activated,
        lambda m, given: F.glu(
            torch.cat([given[1] * (value := given[0].mean(-1, keepdim=True).expand_as(given[1])), value], -1), -1
        ),
    ),
    "glu(cat([x, x])) * v": (
        _activated,
        lambda m, given: F.glu(torch.cat([given[0].mean(-1, keepdim=True)] * 2, -1), -1) * given[1],
    ),
    "(x - x * sigmoid(-x)) * v": (
        _activated,
        lambda m, given: ((value := given[0].mean(-1, keepdim=True)) - value * torch.sigmoid(-value)) * given[1],
    ),
    "v * x - v * x * sigmoid(-x)": (
        _activated,
        lambda m, given: given[1] * (value := given[0].mean(-1, keepdim=True)) - given[1] * value * torch.sigmoid(-value),
    ),
    "(h + h * tanh(h)) * v, h = x / 2": (
        _activated,
        lambda m, given: ((half := given[0].mean(-1, keepdim=True) / 2) + half * torch.tanh(half)) * given[1],
    ),
    "addcmul(h, h, tanh(h)) * v, h = x / 2": (
        _activated,
        lambda m, given: torch.addcmul((half := given[0].mean(-1, keepdim=True) * 0.5), half, torch.tanh(half)) * given[1],
    ),
    "0.5 * (x + x * erf(x / sqrt(2))) * v": (
        lambda m, given: given[1] * F.gelu(given[0].mean(-1, keepdim=True)),
        lambda m, given: 0.5 * ((value := given[0].mean(-1, keepdim=True)) + value * torch.erf(value / 2**0.5)) * given[1],
    ),
    "(x / 2 + x / 2 * erf(x / sqrt(2))) * v": (
        lambda m, given: given[1] * F.gelu(given[0].mean(-1, keepdim=True)),
        lambda m, given: ((value := given[0].mean(-1, keepdim=True)) / 2 + value / 2 * torch.erf(value / 2**0.5)) * given[1],
    ),
    "(softmax * v).sum": (
        _weigh,
        lambda m, given: (torch.softmax(given[0], -1)[..., None] * given[1][:, None]).sum(2),
    ),
    "(softmax * v).sum.view(sizes)": (_weigh, _summed_and_viewed),
    "(softmax * v).transpose.sum": (_weigh, lambda m, given: _products(given).transpose(2, 3).sum(-1)),
    "(softmax * v).flatten.sum.view": (_weigh, lambda m, given: _products(given).flatten(0, 1).sum(1).view(2, 5, 6)),
    "sum of (softmax * v).unbind": (_weigh, _summed_in_parts),
    "stack([softmax[i] * v[i]]).sum": (_weigh, _summed_as_stack),
    "(softmax * v).mean * n": (
        _weigh,
        lambda m, given: (torch.softmax(given[0], -1)[..., None] * given[1][:, None]).mean(2) * 5,
    ),
    "softmax[i] * v[i] + ...": (_weigh, _part_by_part),
    "(exp @ v) / sum": (_weigh, _divided_last),
    "tensordot(softmax, v) of each sample": (
        _weigh,
        lambda m, given: torch.stack([torch.tensordot(torch.softmax(given[0][at], -1), given[1][at], 1) for at in range(2)]),
    ),
    "einsum(exp, v) / sum": (_weigh, _einsum_divided_last),
}


# --- mixtures of experts: the router's scores, and the results of the experts ------------------------------------------------


def _two_chosen(m, given):
    """Mixtral's loop over the experts."""
    weights, chosen = given[0].softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return sum((weights * (chosen == place)).sum(-1, keepdim=True) * given[1][:, place] for place in range(3))


def _one_chosen(m, given):
    """The routing of Switch Transformers."""
    weights, chosen = given[0].softmax(-1).max(-1)
    return weights[:, None] * given[1][torch.arange(4), chosen]


def _mixed(mixture):
    """The sum of results with weights that a function of the scores gives."""
    return lambda m, given: (mixture(given[0])[..., None] * given[1]).sum(1)


def _by_einsum(mixture):
    return lambda m, given: torch.einsum("be,beo->bo", mixture(given[0]), given[1])


def _least_chosen(scores):
    return scores.topk(2, -1).values[:, -1:]


def _hidden(scores):
    return scores.masked_fill(~F.one_hot(scores.topk(2, -1).indices, 3).sum(1).bool(), -torch.inf).softmax(-1)


def _shares(scores):
    weights = scores.softmax(-1)
    weights = weights * (weights >= _least_chosen(weights))
    return weights / weights.sum(-1, keepdim=True)


def _combined(scores):
    weights, chosen = scores.softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bk,bke->be", weights, F.one_hot(chosen, 3).to(weights.dtype))


def _largest(scores):
    weights = scores.softmax(-1)
    return weights * F.one_hot(weights.argmax(-1), 3)


EXPERTS = {
    "scores below the second largest are -inf": (
        _two_chosen,
        _mixed(lambda scores: torch.where(scores < _least_chosen(scores), -torch.inf, scores).softmax(-1)),
    ),
    "scores.masked_fill(~one_hot(topk), -inf)": (_two_chosen, _mixed(_hidden)),
    "scatter of topk into -inf": (
        _two_chosen,
        _mixed(
            lambda scores: torch.full_like(scores, -torch.inf).scatter(-1, (top := scores.topk(2, -1))[1], top[0]).softmax(-1)
        ),
    ),
    "p * (p >= second largest) / sum": (_two_chosen, _mixed(_shares)),
    "einsum(p * (p >= second largest) / sum)": (_two_chosen, _by_einsum(_shares)),
    "einsum(topk, one_hot) in an einsum": (_two_chosen, _by_einsum(_combined)),
    "weights[:, None] @ results": (_two_chosen, lambda m, given: (_shares(given[0])[:, None] @ given[1])[:, 0]),
    "bmm(weights.unsqueeze(1), chosen results)": (
        _two_chosen,
        lambda m, given: torch.bmm(
            F.normalize((top := given[0].softmax(-1).topk(2, -1))[0], p=1, dim=-1).unsqueeze(1),
            torch.take_along_dim(given[1], top[1][..., None], 1),
        ).squeeze(1),
    ),
    "einsum with ... of (p * (p >= second largest) / sum)": (
        _two_chosen,
        lambda m, given: torch.einsum("...e,...eo->...o", _shares(given[0]), given[1]),
    ),
    "softmax computed for each expert": (
        lambda m, given: (given[0].softmax(-1)[..., None] * given[1]).sum(1),
        lambda m, given: sum(given[0].softmax(-1)[:, at : at + 1] * given[1][:, at] for at in range(3)),
    ),
    "p * one_hot(argmax)": (_one_chosen, _mixed(_largest)),
    "einsum(p * one_hot(argmax))": (_one_chosen, _by_einsum(_largest)),
}

_WRITING = (_column_by_column, _half_by_half, _written_over, _in_parts, _in_part, _written_between_zeros, _channels_written)

PAIRS: dict[str, Pair] = {
    **{name: Pair(*pair, Dense) for name, pair in DENSE.items()},
    **{name: Pair(*pair, Sequences) for name, pair in SEQUENCES.items()},
    **{name: Pair(*pair, Images) for name, pair in IMAGES.items()},
    **{name: Pair(*pair, PreActivation) for name, pair in BLOCKS.items()},
    **{name: Pair(*pair, Activated) for name, pair in ACTIVATIONS.items()},
    **{name: Pair(*pair, Attention) for name, pair in SOFTMAXES.items()},
    **{name: Pair(*pair, Weighted) for name, pair in GATES.items()},
    **{name: Pair(*pair, Experts) for name, pair in EXPERTS.items()},
    "softmax along edges * v": Pair(_by_rows, _along_edges, Edges),
    "the same by scatter_add": Pair(_by_rows, _scattered_along_edges, Edges),
    "the same by scatter_add, expand_as": Pair(_by_rows, _scattered_like_messages, Edges),
    "the same by one_hot.T @": Pair(_by_rows, _joined_by_matrix(torch.matmul), Edges),
    "the same by einsum with one_hot": Pair(
        _by_rows, _joined_by_matrix(lambda matrix, messages: torch.einsum("ne,ed->nd", matrix, messages)), Edges
    ),
    "the same by a sum over one_hot": Pair(
        _by_rows, _joined_by_matrix(lambda matrix, messages: (matrix.T[:, :, None] * messages[:, None]).sum(0)), Edges
    ),
    "the same by a sum over a mask": Pair(
        _by_rows, _joined_by_matrix(lambda matrix, messages: ((matrix > 0)[..., None] * messages).sum(1)), Edges
    ),
    "the same by a sum of where(mask, messages, 0)": Pair(
        _by_rows,
        _joined_by_matrix(lambda matrix, messages: torch.where((matrix > 0)[..., None], messages, 0.0).sum(1)),
        Edges,
    ),
    "the same by a sum of masked_fill(other mask, 0)": Pair(
        _by_rows,
        _joined_by_matrix(
            lambda matrix, messages: messages.expand(5, -1, -1).masked_fill((matrix == 0)[..., None], 0.0).sum(1)
        ),
        Edges,
    ),
    "(exp * v).sum / sum": Pair(_pool, _pooled_by_hand, Pooled),
    "over places": Pair(_over_places, _over_places_by_hand, Places),
    "index_add": Pair(_by_groups, _by_index_add, Graph),
    "softmaxes of slices under cat": Pair(
        _by_groups,
        lambda m, x: torch.cat([torch.softmax(x[a:b], 0) for a, b in itertools.pairwise((0, 3, 5, 6, 8, 10))]),
        Graph,
    ),
    "scatter_add": Pair(_by_groups, _by_scatter_add, Graph),
    "scatter_reduce": Pair(_by_groups, _by_scatter_reduce, Graph),
    "as in PyTorch Geometric": Pair(_by_groups, _of_geometric, Graph),
    **{name: Pair(*pair, Series) for name, pair in SERIES.items()},
}
