"""Structures are equal for copies with other parameters, and different after any other change."""

import array
import collections
import copy
import functools
import re
import sys
import types
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from lrpfx.support.identity.structure import Structure


class Settings:
    """An object of a plain class, with slots as well."""

    limits = (0, 1)
    __slots__ = ("__dict__", "factor")

    def __init__(self):
        self.factor, self.names = 2, ["a", "b"]


class Table:
    """A class that is held as it is."""

    size = 3


def double(x):
    return 2 * x


class Model(nn.Module):
    """Attributes of all kinds."""

    options = {"a": [1]}  # noqa: RUF012
    table = Table

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LSTM(3, 3))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.block[0].weight
        self.shared = self.block
        self.unregistered = [nn.Linear(2, 2)]
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.plain = torch.ones(3)
        self.array = np.ones(3)
        self.settings = Settings()
        self.nested = OrderedDict(a=[1, 2.0, {"b": (None, True, "text", {1, 2})}])
        self.function, self.part, self.method = double, functools.partial(double, x=1), self.settings.__init__
        self.cycle = [self]
        self.rate = 0.5


def equal(one, other):
    return one.layout == other.layout and all(map(torch.equal, one.constants, other.constants))


def test_copies_are_equal_and_parameters_are_no_part_of_the_layout():
    model = Model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        other.bn.running_mean.add_(1)
    assert equal(Structure(model), Structure(other))
    assert Structure(model).layout == Structure(Model()).layout


def test_parameters_are_those_of_the_model_by_name():
    model = Model()
    structure = Structure(model)
    assert structure.parameters["shared.0.weight"] is model.tied.weight is structure.parameters["tied.weight"]
    assert structure.parameters["bn.running_var"] is model.bn.running_var
    constants = {id(tensor) for tensor in structure.constants}
    assert {id(model.mask), id(model.scale), id(model.plain)} <= constants
    assert not constants & {id(tensor) for tensor in structure.parameters.values()}


CHANGES = {
    "a number": lambda model: setattr(model, "rate", 0.25),
    "a number of another type": lambda model: setattr(model.settings, "factor", 2.0),
    "a truth value in place of a number": lambda model: model.nested["a"].__setitem__(0, True),
    "an attribute of a part": lambda model: setattr(model.conv, "padding", (1, 1)),
    "a new attribute": lambda model: setattr(model, "new", None),
    "a list": lambda model: model.settings.names.append("c"),
    "a slot": lambda model: setattr(model.settings, "factor", 3),
    "a dict in a dict": lambda model: model.nested["a"][2].update(b=1),
    "an array": lambda model: model.array.__setitem__(0, 2),
    "a plain tensor": lambda model: model.plain.mul_(2),
    "a buffer, through .data": lambda model: model.mask.data.mul_(2),
    "a buffer that is not saved": lambda model: model.scale.mul_(2),
    "a function": lambda model: setattr(model, "function", abs),
    "the method forward": lambda model: setattr(model, "forward", double),
    "a hook": lambda model: model.conv.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.conv.register_forward_pre_hook(lambda *_: None),
    "another layer": lambda model: setattr(model, "conv", nn.Conv2d(2, 3, 3, bias=False)),
    "another class of layer": lambda model: model.block.__setitem__(1, nn.Identity()),
    "a layer outside of the tables": lambda model: model.unregistered.append(nn.ReLU()),
    "the dtype": lambda model: model.to(torch.float32),
    "the mode of training": lambda model: model.block[1].train(False),
    "an untied weight": lambda model: setattr(model.tied, "weight", nn.Parameter(model.tied.weight.detach().clone())),
    "a layer that is no longer shared": lambda model: setattr(model, "shared", copy.deepcopy(model.block)),
    "a class": lambda model: setattr(model.block[1], "__class__", nn.AlphaDropout),
    "what has no state": lambda model: setattr(model, "cycle", re.compile("a")),
}


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(Settings, "limits", (0, 2)), (Table, "size", 4), (Model, "options", {"a": [2]})]
)
def test_changes_of_classes_are_seen(monkeypatch, owner, name, value):
    model = Model()
    before = Structure(model)
    monkeypatch.setattr(owner, name, value)
    assert before.layout != Structure(model).layout


def test_changes_in_place_of_what_a_class_holds_are_seen(monkeypatch):
    monkeypatch.setattr(Model, "options", copy.deepcopy(Model.options))
    model = Model()
    before = Structure(model)
    Model.options["a"].append(2)
    assert before.layout != Structure(model).layout


def described():
    """A function with an attribute."""


described.offset = 1.0
CONTAINERS = {
    "SimpleNamespace": (lambda: types.SimpleNamespace(scale=1.0), lambda held: setattr(held, "scale", 2.0)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "Counter": (lambda: collections.Counter("aab"), lambda held: held.update("b")),
    "defaultdict": (lambda: collections.defaultdict(list), lambda held: held["a"].append(1)),
    "ChainMap": (lambda: collections.ChainMap({"a": 1}, {"b": 2}), lambda held: held.maps[1].update(b=3)),
    "UserList": (lambda: collections.UserList([1]), lambda held: held.append(2)),
    "array": (lambda: array.array("d", [1.0, 2.0]), lambda held: held.__setitem__(0, 3.0)),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.__setitem__(0, 99)),
    "a set of tuples": (lambda: {(1, 2)}, lambda held: held.add((3, 4))),
    "an attribute of a function": (lambda: described, lambda held: setattr(held, "offset", held.offset + 1)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_changes_of_containers_are_seen(name):
    make, change = CONTAINERS[name]
    model = Model()
    model.held = make()
    before = Structure(model)
    assert before.layout == Structure(model).layout
    change(model.held)
    assert before.layout != Structure(model).layout


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change):
    model = Model()
    before = Structure(model)
    constants = [tensor.clone() for tensor in before.constants]
    assert equal(before, Structure(model))
    change(model)
    after = Structure(model)
    same = len(constants) == len(after.constants) and all(map(torch.equal, constants, after.constants))
    assert before.layout != after.layout or not same


def test_long_chains_of_objects_end():
    class Link:
        def __init__(self, following):
            self.following = following

    chain = None
    for _ in range(10000):
        chain = Link(chain)
    model = nn.Linear(2, 2)
    model.chain = chain
    before = Structure(model)
    assert equal(before, Structure(model))
    chain.following.following = None
    assert not equal(before, Structure(model))
    while chain is not None:  # Python's own destruction of a chain takes its stack
        chain = chain.following


def test_long_chains_of_bound_methods_end():
    chain = "end"
    for _ in range(2 * sys.getrecursionlimit()):
        chain = types.MethodType(len, chain)
    model = nn.Linear(2, 2)
    model.chain = chain
    assert equal(Structure(model), Structure(model))


def test_modules_in_modules_are_compared_at_any_depth():
    model = inner = nn.ReLU()
    for _ in range(60):
        model = nn.Sequential(model)
    before = Structure(model)
    inner.register_buffer("mask", torch.ones(2))
    assert not equal(before, Structure(model))
    inner.rate = 1
    changed = Structure(model)
    inner.rate = 2
    assert not equal(changed, Structure(model))


def test_what_cannot_be_compared_is_equal_to_itself_until_it_is_written():
    model = nn.Linear(2, 2)
    model.table = torch.eye(3).to_sparse()
    before = Structure(model)
    assert equal(before, Structure(model))
    assert not equal(before, Structure(copy.deepcopy(model)))
    model.table.mul_(2)
    assert not equal(before, Structure(model))
