"""What random networks are made of, and random networks. Each feature is a function that adds a step to a network.

A feature that the compiler does not get right yet stands in `PENDING` with the name of its set, and is left out unless that set
is asked for.
"""

from collections.abc import Sequence

from ..network import BATCH, BOOLEAN, CLASSES, CONSTANT, INTEGER, SIGNAL, Builder, Network, UnfitError
from . import arithmetic, attention, constants, layers, sizes, towers, views  # noqa: F401  which enter their features into the table
from .table import FEATURES, TOKENS, WEIGHTS, Feature

#: Features that the compiler does not get right yet, by the set under which they can be asked for.
PENDING: dict[str, tuple[str, ...]] = {}


def features(pending: Sequence[str] = ()) -> list[Feature]:
    """The features to draw from: all but those that are pending, with the named pending sets."""
    left_out = {name for title, names in PENDING.items() if title not in pending for name in names}
    unknown = left_out - set(FEATURES)
    assert not unknown, unknown
    return [feature for name, feature in FEATURES.items() if name not in left_out]


def generate(seed: int, pending: Sequence[str] = (), only: Sequence[str] = ()) -> Network:
    """The network of a seed. `only`: groups or names of features that may stand beside dense layers and activations."""
    builder = Builder(seed)
    available = features(pending)
    if only:
        available = [one for one in available if {one.name, one.group} & {*only, "linear", "convolution", "relu"}]
    by_group: dict[str, list[Feature]] = {}
    for one in available:
        by_group.setdefault(one.group, []).append(one)
    _add_inputs(builder)
    steps, tries = builder.integer(2, 9), 0
    while len(builder.steps) < steps and tries < 200:
        tries += 1
        (group,) = builder.random.choices(list(by_group), [WEIGHTS[name] for name in by_group])
        if builder.values[-1].kind == CONSTANT and builder.chance(0.8):
            group = "uses_of_constants" if builder.chance(0.7) else "functions_of_constants"
        chosen = builder.choice(by_group[group])
        try:
            chosen.add(builder)
        except UnfitError:
            builder.discard()
            continue
        builder.name_feature(chosen.name)
    return _with_head(builder)


def _add_inputs(b: Builder) -> None:
    kind = b.choice(["images", "images", "series", "vectors", "tokens", "tokens"])
    sign = "rand" if b.chance(0.3) else "randn"
    if kind == "images":
        shape: tuple[int, ...] = (b.integer(1, 4), b.integer(4, 7), b.integer(4, 7))
    elif kind == "vectors":
        shape = (b.integer(3, 8),)
    else:
        shape = (b.integer(3, 5), b.integer(3, 6))
    if kind == "tokens":
        b.argument("tokens", shape[:1], f"torch.randint({TOKENS}, ({BATCH}, {shape[0]}))", INTEGER)
        if b.chance(0.4):
            b.argument("mask", shape[:1], f"torch.rand({BATCH}, {shape[0]}) > 0.3", BOOLEAN)
        FEATURES["embedding"].add(b)
        b.name_feature("embedding")
    else:
        b.argument("x", shape, f"torch.{sign}({BATCH}, {', '.join(map(str, shape))})")
    if b.chance(0.3):
        b.argument("y", shape, f"torch.randn({BATCH}, {', '.join(map(str, shape))})")
    if kind == "series" and b.chance(0.3):
        b.argument("mask", shape[:1], f"torch.rand({BATCH}, {shape[0]}) > 0.3", BOOLEAN)


def _with_head(b: Builder) -> Network:
    """The network with logits made of the values that nothing else reads."""
    read = {name for step in b.steps for name in step.reads}
    made = [value for value in b.values if value.kind == SIGNAL]
    ends = [value for value in made if value.name not in read][-3:] or made[-1:]
    b.value(SIGNAL, lambda value: value.name == ends[-1].name)
    for end in ends[:-1]:
        b.value(SIGNAL, lambda value, end=end: value.name == end.name)
    flat = [end.name if len(end.shape) == 1 else f"{end.name}.flatten(1)" for end in ends]
    joined = flat[0] if len(flat) == 1 else f"torch.cat([{', '.join(flat)}], 1)"
    head = b.module(f"nn.Linear({sum(end.size for end in ends)}, {CLASSES})", "head")
    logits = b.emit(f"{head}({joined})", shape=(CLASSES,))
    b.name_feature("head")
    result, output = b.choice(
        [
            (logits.name, None),
            (logits.name, None),
            (logits.name, None),
            (f"({logits.name}, {ends[0].name})", 0),
            (f"{{'logits': {logits.name}, 'features': {ends[-1].name}}}", "logits"),
        ]
    )
    return Network(b.seed, tuple(b.inputs), tuple(b.steps), result, output).without_unused()
