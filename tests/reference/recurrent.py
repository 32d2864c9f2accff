"""Relevance of recurrent layers, step by step and sample by sample, as in the papers. Slow on purpose.

Gates take no relevance, the signals that they scale take all of it (Arras et al. 2017 and 2019). Every denominator gets the
same stabilizer. Nothing here is vectorized over steps, and no function of lrpfx is used.
"""

import torch


def stabilized(value, epsilon):
    return value + torch.where(value >= 0, epsilon, -epsilon)


class Step:
    """One step of one layer for one sample: vectors in, vectors out, relevance back."""

    def __init__(self, mode, weights, x, h, c, epsilon):
        self.mode, self.weights, self.epsilon = mode, weights, epsilon
        self.x, self.h_before, self.c_before = x, h, c
        w_ih, w_hh, b_ih, b_hh, w_hr = weights
        units = w_hh.shape[0] // {"LSTM": 4, "GRU": 3}.get(mode, 1)
        nothing = torch.zeros(w_hh.shape[0], dtype=x.dtype)
        b_ih, b_hh = (nothing if bias is None else bias for bias in (b_ih, b_hh))

        def block(number):
            rows = slice(number * units, (number + 1) * units)
            return w_ih[rows], w_hh[rows], b_ih[rows], b_hh[rows]

        def affine(number):
            w, u, b, d = block(number)
            return w @ x + b + u @ h + d

        if mode == "LSTM":
            self.i, self.f, self.g, self.o = (
                torch.sigmoid(affine(0)),
                torch.sigmoid(affine(1)),
                affine(2),
                torch.sigmoid(affine(3)),
            )
            self.w, self.u, self.b, self.d = block(2)
            self.c = self.f * c + self.i * torch.tanh(self.g)
            self.raw = self.o * torch.tanh(self.c)
            self.h = self.raw if w_hr is None else w_hr @ self.raw
        elif mode == "GRU":
            self.r, self.z = torch.sigmoid(affine(0)), torch.sigmoid(affine(1))
            self.w, u, self.b, d = block(2)
            self.u, self.d = self.r[:, None] * u, self.r * d
            self.g = self.w @ x + self.b + self.u @ h + self.d
            self.h = self.z * h + (1 - self.z) * torch.tanh(self.g)
            self.c = None
        else:
            self.w, self.u, self.b, self.d = block(0)
            self.g = affine(0)
            self.h = torch.relu(self.g) if mode == "RNN_RELU" else torch.tanh(self.g)
            self.c = None

    def back(self, of_h, of_c):
        """Relevance of x, of h and c before the step, and the share of the biases."""
        w_hr = self.weights[4]
        if self.mode == "LSTM":
            if w_hr is not None:  # a dense layer
                of_h = self.raw * (w_hr.T @ (of_h / stabilized(self.h, self.epsilon)))
            of_c = of_c + of_h  # o is a gate, tanh passes relevance on
            share = of_c / stabilized(self.c, self.epsilon)
            of_g, of_before = self.i * torch.tanh(self.g) * share, self.f * self.c_before * share
        elif self.mode == "GRU":
            share = of_h / stabilized(self.h, self.epsilon)
            of_g, of_before = (1 - self.z) * torch.tanh(self.g) * share, self.z * self.h_before * share
        else:
            of_g, of_before = of_h, None
        ratio = of_g / stabilized(self.g, self.epsilon)
        of_x, of_h_before = self.x * (self.w.T @ ratio), self.h_before * (self.u.T @ ratio)
        bias = (ratio * (self.b + self.d)).sum()
        if self.mode == "GRU":
            return of_x, of_h_before + of_before, None, bias
        return of_x, of_h_before, of_before, bias


class Layer:
    """One layer in one direction for one sample: `x` has shape (steps, features)."""

    def __init__(self, mode, weights, x, h, c, reverse, epsilon):
        self.steps, self.order = {}, list(range(len(x)))[:: -1 if reverse else 1]
        for time in self.order:
            self.steps[time] = Step(mode, weights, x[time], h, c, epsilon)
            h, c = self.steps[time].h, self.steps[time].c
        self.output = torch.stack([self.steps[time].h for time in range(len(x))])
        self.last = (h, c)

    def back(self, of_output, of_last_h, of_last_c):
        """Relevance of the input, of the initial states, and the share of the biases."""
        of_h, of_c, found, bias = of_last_h, of_last_c, {}, 0.0
        for time in reversed(self.order):
            found[time], of_h, of_c, taken = self.steps[time].back(of_h + of_output[time], of_c)
            bias = bias + taken
        return torch.stack([found[time] for time in range(len(found))]), of_h, of_c, bias


def weights_of(module, layer, reverse):
    suffix = f"l{layer}" + ("_reverse" if reverse else "")
    names = [f"{name}_{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")]
    return [None if not hasattr(module, name) else getattr(module, name).detach() for name in names]


def run(module, x, hidden, cell, of_output, of_hidden, of_cell, epsilon):
    """A module of torch.nn for one sample: `x` is (steps, features), states are (layers * directions, units).

    Returns the output, the final states, the relevance of `x`, of the initial states, and the share of the biases, given the
    relevance of the output and of the final states.
    """
    directions = 2 if module.bidirectional else 1
    layers, value = [], x
    for layer in range(module.num_layers):
        made = []
        for reverse in range(directions):
            number = layer * directions + reverse
            c = cell[number] if module.mode == "LSTM" else None
            made.append(
                Layer(module.mode, weights_of(module, layer, reverse), value, hidden[number], c, bool(reverse), epsilon)
            )
        layers.append(made)
        value = torch.cat([one.output for one in made], -1)
    output = value
    last_hidden = torch.stack([one.last[0] for made in layers for one in made])
    last_cell = torch.stack([one.last[1] for made in layers for one in made]) if module.mode == "LSTM" else None
    bias, of_hidden_before, of_cell_before = 0.0, {}, {}
    for layer in reversed(range(module.num_layers)):
        parts = of_output.split(of_output.shape[1] // directions, -1)
        of_input = 0.0
        for reverse in range(directions):
            number = layer * directions + reverse
            of_c = of_cell[number] if module.mode == "LSTM" else None
            found, of_h, of_c, taken = layers[layer][reverse].back(parts[reverse], of_hidden[number], of_c)
            of_input, bias = of_input + found, bias + taken
            of_hidden_before[number], of_cell_before[number] = of_h, of_c
        of_output = of_input
    count = module.num_layers * directions
    before = torch.stack([of_hidden_before[number] for number in range(count)])
    cells = torch.stack([of_cell_before[number] for number in range(count)]) if module.mode == "LSTM" else None
    return output, (last_hidden, last_cell), of_output, (before, cells), bias
