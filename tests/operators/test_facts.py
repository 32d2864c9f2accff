"""Facts of rows hold for their samples, and for other values, signs, sizes, numbers of dimensions and options."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from lrpfx.concepts.reach import Call as TrackedCall
from lrpfx.concepts.reach import Tracked, with_own_positions
from lrpfx.ir.node import NodeInfo, floating_tensors, set_info
from lrpfx.ir.operator import Channels, Fill, Form, NotAffineError, Probability, Repeats, Sign
from lrpfx.operators import mixing, table
from lrpfx.operators.row import with_facts
from lrpfx.operators.samples import IMAGE, MATRIX, Fixed, Signal, Weight, call, of, signal, weight
from lrpfx.support.dotted_paths import resolve_path

#: What torch raises for arguments that it does not take.
REFUSED = (
    TypeError,
    AttributeError,
    RuntimeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AssertionError,
    ZeroDivisionError,
)

#: Samples of rows that only the compiler inserts.
INSERTED = {
    "recurrent": call(
        input=signal(2, 3, 3),
        hidden=signal(2, 2),
        cell=signal(2, 4),
        weight_ih=weight(16, 3),
        weight_hh=weight(16, 2),
        bias_ih=weight(16),
        bias_hh=weight(16),
        weight_hr=weight(2, 4),
        reverse=True,
        batch_first=True,
    ),
    "thresholded_relu": call(input=IMAGE, scale=weight(4), shift=weight(4)),
    "require_matrix": call(input=MATRIX),
    "require_dimensions": call(input=IMAGE, dimensions=4),
    "detach": of(lambda x: x.detach()),
}
#: Calls of which the sample's options show nothing.
FURTHER = {
    "unfold": [of(lambda x: x.unfold(1, 2, 1))],
    "reshape": [of(lambda x: x.reshape(x.shape))],
    "pad": [call(input=IMAGE, pad=(1, 2, 1, 1), mode="replicate")],
}
ROWS = [row for row in table.all_operators() if row.sample is not None or row.name in INSERTED]
STRINGS = ("bicubic", "nearest", "bilinear", "reflect", "replicate", "circular", "constant", "floor", "trunc", "none", "tanh")


# --- calls ------------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call in a graph whose inputs are the sample's tensors. Tensors among its arguments are nodes of the graph."""

    root: nn.Module
    graph: fx.Graph
    function: Any
    args: tuple
    options: dict
    leaves: dict  # placeholder -> what makes its tensor
    bound: dict  # arguments by name

    @property
    def signals(self):
        return [node for node, leaf in self.leaves.items() if isinstance(leaf, Signal) and not isinstance(leaf, Weight)]


class _Before(fx.Interpreter):
    """Values of the nodes of a graph up to those that a call takes."""

    def values_of(self, nodes, made):
        self.env = dict(made)
        for node in self.graph.nodes:
            if node in nodes and node not in self.env:
                self.env[node] = self.run_node(node)
        return self.env


def method_called(name):
    return lambda input, *args, **options: getattr(input, name)(*args, **options)


def calls_of(row):
    """The calls of a row in its sample, and in further samples."""
    first = row.sample or INSERTED[row.name]
    return [one for sample in (first, *FURTHER.get(row.name, ())) for one in calls_in(row, sample)]


def calls_in(row, sample):
    if sample.function is None:
        return [named_call(row, sample)]
    function = sample.function
    root = fx.symbolic_trace(
        [lambda x: function(x), lambda x, y: function(x, y), lambda x, y, z: function(x, y, z)][len(sample.arguments) - 1]
    )
    graph = root.graph
    placeholders = graph.find_nodes(op="placeholder")
    leaves = dict(zip(placeholders, sample.arguments.values(), strict=False))
    found = []
    for node in graph.nodes:
        spelling = table.spelling_of(node)
        if spelling is not None and spelling.operator.name == row.name and node.args:
            function = method_called(node.target) if node.op == "call_method" else node.target
            function = row.canonical if spelling.inplace else function
            bound = {**row.arguments, "input": node.args[0], **dict(zip(spelling.arguments, node.args, strict=False))}
            found.append(Call(root, graph, function, node.args, dict(node.kwargs), leaves, bound))
    if not found:  # the sample calls it by another row's spelling
        bound = {**row.arguments, **dict(zip(row.data, placeholders, strict=False))}
        found.append(Call(root, graph, sample.function, tuple(leaves), {}, leaves, bound))
    return found


def named_call(row, sample):
    graph = fx.Graph()
    leaves = {}

    def node_for(name, value):
        if isinstance(value, tuple):
            return tuple(node_for(name, item) for item in value)
        if not isinstance(value, (Signal, Fixed)):
            return value
        node = graph.placeholder(f"{name}_{len(leaves)}")
        leaves[node] = value
        return node

    arguments = {name: node_for(name, value) for name, value in sample.arguments.items()}
    bound = {**row.arguments, **arguments}
    function = row.function or next(iter(row.spellings.functions), None) or resolve_path(next(iter(row.spellings.foreign)))
    leading = list(itertools.takewhile(lambda name: name in row.tensors and name in arguments, row.arguments))
    args = tuple(arguments.pop(name) for name in leading)
    return Call(nn.Module(), graph, function, args, arguments, leaves, bound)


def drawn(one, signals=None, shapes=None):
    """Tensors for the placeholders of a call. `signals`: a function of a placeholder's leaf that makes its tensor."""
    made = {}
    for node, leaf in one.leaves.items():
        if shapes is not None and node in shapes:
            leaf = type(leaf)(shapes[node], leaf.low, leaf.high)
        own = signals is None or not isinstance(leaf, Signal) or isinstance(leaf, Weight)
        made[node] = leaf.make() if own else signals(leaf)
    return made


def between(low, high):
    return lambda leaf: torch.rand(leaf.shape) * (high - low) + low


def result_of(one, made):
    """The result of a call, and its arguments in order."""
    nodes = set()
    fx.node.map_arg((one.args, one.options), nodes.add)
    pending = list(nodes)
    while pending:
        further = [node for node in pending.pop().all_input_nodes if node not in nodes]
        nodes.update(further)
        pending += further
    values = _Before(one.root, graph=one.graph).values_of(nodes, made)
    args, options = fx.node.map_arg((one.args, one.options), values.__getitem__)
    return one.function(*args, **options), (args, options)


def first_of(arguments):
    args, options = arguments
    return next(value for value in (*args, *options.values()) if isinstance(value, torch.Tensor))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def alternatives(value):
    """Other values that an option may take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [number for number in (-1, 0, 1, 2, 3) if number != value]
    if isinstance(value, float):
        return [-value, 2.0, 0.0, -1.0, 0.5]
    if isinstance(value, str):
        return [*STRINGS, "bij,bjk->bi"]
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, int) for item in value):
        return [value[:1], value[-1:], value[::-1], (1, *value), tuple(item - 1 for item in value), value[0]]
    return []


def variants(row, one):
    """The call, and calls with one other option, or without one."""
    yield one
    for place, value in enumerate(one.args):
        numbers = [2.0, -2.0] if place and isinstance(value, fx.Node) and one.leaves.get(value) in numeric(one) else []
        for other in [*alternatives(value), *numbers]:
            bound = {name: other if given is value else given for name, given in one.bound.items()}
            yield one._replace(args=(*one.args[:place], other, *one.args[place + 1 :]), bound=bound)
    if len(one.args) > 1 and isinstance(one.args[1], int):
        yield one._replace(args=(one.args[0], 2, *one.args[1:]))
    for name, value in one.options.items():
        for other in alternatives(value):
            yield one._replace(options={**one.options, name: other}, bound={**one.bound, name: other})
        if name in row.arguments or row.sample is None or row.sample.function is not None:
            left = {key: given for key, given in one.options.items() if key != name}
            yield one._replace(options=left, bound={**one.bound, name: row.arguments.get(name)})


def numeric(one):
    return [leaf for leaf in one.leaves.values() if isinstance(leaf, Signal) and not isinstance(leaf, Weight)]


def results_of_variants(row, signals=None):
    """Each call of the row that torch accepts with its arguments and result. The sample's own calls must be accepted."""
    for own in calls_of(row):
        for one in variants(row, own):
            made = drawn(one, signals)
            try:
                result, arguments = result_of(one, made)
            except REFUSED:
                assert one is not own, f"torch does not take the sample of {row}"
                continue
            yield one, result, arguments


def other_shapes(one):
    """Shapes for the tensors of a call: with each size 1 or 2, a dimension more, or a dimension less."""
    tensors = {node: one.leaves[node].shape for node in one.signals}
    own = list(tensors.values())
    for place in range(max(map(len, own), default=0)):
        for size in (1, 2):
            shapes = {node: tensors[node] for node in one.signals if len(tensors[node]) > place}
            yield True, {node: (*shape[:place], size, *shape[place + 1 :]) for node, shape in shapes.items()}
    for node, shape in tensors.items():
        for changed in (shape[1:], (1, *shape), (2, *shape), shape[:-1], shape[-1:], shape[-2:-1]):
            yield False, {node: changed}
    yield False, {node: tensors[node][1:] for node in one.signals}
    yield False, {node: (3, *tensors[node]) for node in one.signals}
    yield False, dict.fromkeys(one.signals, (3,))


def results_of_shapes(row, one):
    """Whether only sizes differ from the sample's, the result, and the arguments."""
    for same, shapes in other_shapes(one):
        try:
            result, arguments = result_of(one, drawn(one, shapes=shapes))
        except REFUSED:
            continue
        yield same, result, arguments


def is_close(actual, expected, tolerance=1e-9):
    return actual.shape == expected.shape and torch.allclose(actual, expected, tolerance, tolerance)


# --- facts --------------------------------------------------------------------------------------------------------------------

SIDES = {Sign.NONPOSITIVE: (-2.0, 0.0), Sign.NONNEGATIVE: (0.0, 2.0), Sign.UNKNOWN: (-2.0, 2.0)}


def check_sign(row):
    """For signals of every sign, and other options."""
    if row.values.sign is None:
        return
    for own in calls_of(row):
        for one in variants(row, own):
            for signs in itertools.product(SIDES, repeat=len(one.signals)):
                check_sign_of_call(row, one, dict(zip(one.signals, signs, strict=True)))


def check_sign_of_call(row, one, signs):
    for node in one.graph.nodes:
        source = node
        while source not in signs and source.all_input_nodes:
            source = source.all_input_nodes[0]
        set_info(node, NodeInfo(node.name, sign=signs.get(source, Sign.UNKNOWN)))
    claimed = row.values.sign(one.bound)
    if claimed is Sign.UNKNOWN:
        return
    for _ in range(2):
        made = drawn(one)
        made.update({node: between(*SIDES[sign])(one.leaves[node]) for node, sign in signs.items()})
        try:
            result, _ = result_of(one, made)
        except REFUSED:
            return
        for tensor in floating_tensors(result):
            tensor = tensor[torch.isfinite(tensor)]
            low = claimed is Sign.NONNEGATIVE
            assert (tensor >= -1e-9).all() if low else (tensor <= 1e-9).all(), (row, one.bound, signs)


def check_adds_up(row):
    if not row.entries.adds_up:
        return
    for one, _, _ in results_of_variants(row):
        (node,) = one.signals
        assert len(one.leaves) == 1
        a, b = one.leaves[node].make(), -3 * one.leaves[node].make()
        first, second, both = (result_of(one, {node: value})[0] for value in (a, b, a + b))
        assert is_close(both, first + second)
        for gradient in gradients(lambda x, one=one, node=node: result_of(one, {node: x})[0], a):
            assert (gradient >= 0).all()


def gradients(function, x, most=16):
    x = x.clone().requires_grad_()
    output = function(x).flatten()
    for entry in output[:: max(1, len(output) // most)]:
        yield torch.autograd.grad(entry, x, retain_graph=True)[0]


def check_multiplies_up(row):
    if not row.entries.multiplies_up:
        return
    for one in calls_of(row):
        (node,) = one.signals
        assert len(one.leaves) == 1
        x = between(0.5, 2.0)(one.leaves[node])
        powers = torch.stack(
            list(gradients(lambda u, one=one, node=node: result_of(one, {node: u.exp()})[0].log(), x.log(), math.inf))
        )
        assert is_close(powers, powers.round()) and set(powers.round().flatten().tolist()) <= {0.0, 1.0}
        for _ in range(3):
            x = between(-2.0, 2.0)(one.leaves[node])
            expected = (x ** powers.round()).flatten(1).prod(1)
            assert is_close(result_of(one, {node: x})[0].flatten(), expected)


def check_positive_part(row):
    if row.values.positive_part:
        for one in calls_of(row):
            for scale in (0.0, 1.0, 10.0, 100.0):
                result, arguments = result_of(one, drawn(one, between(-scale, scale)))
                assert torch.equal(result, first_of(arguments).clamp(min=0))


def check_keeps_nonpositive(row):
    if not row.values.keeps_nonpositive:
        return
    for own, (low, high) in itertools.product(calls_of(row), ((-10.0, 10.0), (-10.0, 0.0), (-1.0, 0.0), (0.0, 0.0))):
        for one in [*variants(row, own)] * 3:
            made = drawn(one, between(-10.0, 10.0))
            made[one.signals[0]] = between(low, high)(one.leaves[one.signals[0]])
            result, arguments = accepted(one, made)
            assert result is not None or one is not own
            if result is not None:
                assert not ((result > 0) & (first_of(arguments) <= 0)).any()


def check_channels(row):
    """Affine maps per channel, with scales of either sign."""
    if row.merging.channels is None:
        return
    for own in calls_of(row):
        for one in variants(row, own):
            (node,) = one.signals
            made = drawn(one)
            count, rank = made[node].shape[1], made[node].ndim
            try:
                channels = row.merging.channels(Channels(rank), one.bound)
            except NotAffineError:
                continue
            for scale in (torch.linspace(-1.5, 2.0, count), torch.linspace(1.0, -2.0, count), torch.randn(count)):
                shift = torch.randn(count)
                try:
                    result, _ = result_of(one, made)
                except REFUSED:
                    assert one is not own
                    break
                per_channel = (-1, *[1] * (rank - 2))
                mapped = {**made, node: made[node] * scale.reshape(per_channel) + shift.reshape(per_channel)}
                repeated = result.shape[1] // count
                assert channels.dimensions == result.ndim and (repeated == 1 or channels.flat)
                shape = (-1, *[1] * (result.ndim - 2))
                scales, shifts = (value.repeat_interleave(repeated).reshape(shape) for value in (scale, shift))
                assert is_close(result_of(one, mapped)[0], result * scales + shifts)


def check_rank(row):
    """The facts about numbers of dimensions: `rank`, `rank_of`, `keeps_rank`, `broadcasts` and `squeezes`."""
    for one, result, arguments in results_of_variants(row):
        check_rank_of_call(row, one, result, arguments)
    depends = False
    for one in calls_of(row):
        result, _ = result_of(one, drawn(one))
        for name in (
            () if row.dimensions.broadcasts else [name for name, value in one.options.items() if isinstance(value, float)]
        ):
            changed, arguments = accepted(one._replace(options={**one.options, name: torch.full((1,) * 7, 0.7)}), drawn(one))
            assert changed is None or changed.ndim == first_of(arguments).ndim
        for same, changed, arguments in results_of_shapes(row, one):
            check_rank_of_call(row, one, changed, arguments)
            depends |= same and isinstance(result, torch.Tensor) and changed.ndim != result.ndim
    assert depends == row.dimensions.squeezes
    for module_class, rank in row.dimensions.rank_of.items():
        module = module_class(4).eval()
        for dimensions in range(2, 7):
            x = torch.rand(4, 4, *[3] * (dimensions - 2))
            if dimensions == rank:
                assert module(x).ndim == rank
            else:
                with pytest.raises(ValueError):
                    module(x)


def check_rank_of_call(row, one, result, arguments):
    if row.dimensions.rank is not None and (rank := row.dimensions.rank(one.bound)) is not None:
        assert result.ndim == rank
    first, *parameters = tensors_in(arguments)
    mapped = row.name.endswith("_with_bias_map") and parameters[-1].ndim > first.ndim  # a bias for a batch, an input without
    if row.dimensions.keeps_rank and not mapped:
        others = [tensor.ndim for tensor in tensors_in(arguments)] if row.dimensions.broadcasts else []
        for tensor in tensors_in(result)[:1]:
            assert tensor.ndim == max([first.ndim, *others]), (row, one.args, one.options)


def check_dimension_before(row):
    """A slice of the result is the result for the same slice of the dimension before."""
    if row.dimensions.dimension_before is None:
        return
    large = [
        (one, *accepted(one, drawn(one, shapes={node: (3, 4, *one.leaves[node].shape) for node in one.signals})))
        for own in calls_of(row)
        for one in variants(row, own)
    ]
    for one, result, arguments in [*results_of_variants(row), *large]:
        if result is None:
            continue
        args, options = arguments
        given = [*args[1:], *options.values()]
        given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if not given or (row.dimensions.squeezes and result.ndim != args[0].ndim - len(given)):
            continue  # it has no effect on a dimension of another size than 1
        if row.dimensions.added:
            assert result.ndim - args[0].ndim == row.dimensions.added * len(given)
        for place in range(result.ndim):
            before = row.dimensions.dimension_before(place, given, result.ndim)
            if before is None:
                assert result.shape[place] == 1
                continue
            assert result.shape[place] == args[0].shape[before]
            entry = min(1, result.shape[place] - 1)
            narrowed = one.function(args[0].narrow(before, entry, 1).expand(args[0].shape), *args[1:], **options)
            assert is_close(narrowed, result.narrow(place, entry, 1).expand(result.shape))


def check_keeps_last_dimension(row):
    if row.dimensions.keeps_last_dimension is None:
        return
    for one, result, (args, options) in results_of_variants(row):
        if not row.dimensions.keeps_last_dimension(args[1:], args[0].ndim):
            continue
        for tensor in tensors_in(result):
            assert is_close(one.function(args[0].flip(-1), *args[1:], **options), tensor.flip(-1))
            assert tensor.shape[-1] == args[0].shape[-1]


def check_elementwise(row):
    """An entry of an argument changes the result at most at its place, also if it is broadcast."""
    if not row.entries.elementwise:
        return
    for one in calls_of(row):
        assert one.signals
        shaped = [{}] + [shapes for same, shapes in other_shapes(one) if same and len(one.signals) > 1]
        for shapes, node in itertools.product(shaped, one.signals):
            made = drawn(one, shapes={other: shapes[other] for other in one.signals if other in shapes and other is node})
            result, _ = result_of(one, made) if not shapes else accepted(one, made)
            if result is None:
                continue
            for entry in range(made[node].numel()):
                place = torch.zeros(made[node].numel(), dtype=torch.bool)
                place[entry] = True
                place = place.reshape(made[node].shape)
                changed, _ = result_of(one, {**made, node: torch.where(place, made[node] * 1.5 + 0.1, made[node])})
                assert not ((changed != result) & ~place.broadcast_to(result.shape)).any()


def check_reach(row):
    """The entries that an entry of the result depends on are within its reach, of which `mixes` and `accumulates` tell."""
    for one, result, (args, options) in results_of_variants(row):
        if row.sample is not None and one.function is row.sample.function:
            continue  # other calls beside that of the row
        if not torch.equal(*(tensors_in(one.function(*args, **options))[0] for _ in range(2))):
            continue  # random
        if any(given.layout is not torch.strided for given in tensors_in((args, options))):
            continue  # entries of sparse tensors cannot be changed
        tracked_args, tracked_options = with_own_positions((args, options), first=0)
        found = tensors_in_tracked(TrackedCall(one.function, row, tracked_args, tracked_options).run())
        component = 0
        for given in tensors_in((args, options)):
            for entry in torch.randperm(given.numel())[:4].tolist() if given.is_floating_point() else ():
                place = torch.unravel_index(torch.tensor(entry), given.shape)
                for change in (lambda value: 1.5 * value + 0.1, lambda value: value - 3.0):
                    before = given.clone()
                    given[place] = change(given[place])
                    changed = accepted_call(one.function, args, options)
                    given.copy_(before)
                    for value, other, reach in zip(tensors_in(result), tensors_in(changed), found, strict=False):
                        if value.shape != other.shape or not value.dtype.is_floating_point:
                            continue
                        differs = ~torch.isclose(value, other, 1e-9, 1e-9, equal_nan=True)
                        for dim, at in enumerate(place):
                            end, from_end = reach[component + 2 * dim : component + 2 * dim + 2]
                            assert (end[differs] > at).all() and (from_end[differs] >= given.shape[dim] - at).all(), one.bound
            component += 2 * given.ndim or 1


def tensors_in_tracked(value):
    """The reach of each tensor in a result."""
    if isinstance(value, (tuple, list)):
        return [reach for item in value for reach in tensors_in_tracked(item)]
    return [value.reach] if isinstance(value, Tracked) else []


def accepted_call(function, args, options):
    try:
        return function(*args, **options)
    except REFUSED:
        return None


def accepted(one, made):
    try:
        return result_of(one, made)
    except REFUSED:
        return None, None


def check_moves(row):
    if row.entries.moves:
        assert_entries_are_those_of_arguments(row)


def check_selects(row):
    if row.entries.selects:  # what accumulates is a sum, with a row of its own
        assert_entries_are_those_of_arguments(row, lambda one: not one.bound.get("accumulate"))


def assert_entries_are_those_of_arguments(row, of_interest=lambda one: True):
    for signals in (None, between(-30.0, 30.0), between(-2.0, -1.0)):
        for one, result, arguments in results_of_variants(row, signals):
            if not of_interest(one):
                continue
            known = {entry for tensor in tensors_in(arguments) for entry in tensor.flatten().tolist()}
            known |= {0.0, *(value for value in (*arguments[0], *arguments[1].values()) if isinstance(value, (int, float)))}
            assert all(set(tensor.flatten().tolist()) <= known for tensor in floating_tensors(result))


def check_ratio(row):
    """Times the input it gives the result back, and it is finite and continuous up to a kink at 0."""
    if row.values.ratio is None:
        return
    for one, result, arguments in results_of_variants(row, between(-4.0, 4.0)):
        x = first_of(arguments)
        args, options = arguments
        bound = {**row.arguments, **dict(zip(row.arguments, args, strict=False)), **options}
        others = [value for name, value in bound.items() if name != "input"]
        if any(isinstance(value, torch.Tensor) for value in others) or one.function is not row.canonical:
            continue
        finite = torch.isfinite(result)
        assert is_close((row.values.ratio(x, bound) * x)[finite], result[finite]), bound
        near = [row.values.ratio(torch.full((1,), value), bound) for value in (-1e-9, 0.0, 1e-9)]
        assert min(near[0], near[2]) - 1e-6 <= near[1] <= max(near[0], near[2]) + 1e-6, bound


# torch's kernel multiplies by 1/6 in float32 in double precision, too: its gradient is off by 3e-8 (2.13).
EXACT_IN_DOUBLE = {nn.functional.hardsigmoid: lambda x, **_: nn.functional.relu6(x + 3) / 6}


def check_derivative(row):
    """It is what autograd finds, in both tails, too."""
    if row.values.derivative is None:
        return
    for signals in (between(-4.0, 4.0), between(-30.0, 30.0)):
        for one, _, (args, options) in results_of_variants(row, signals):
            bound = {**row.arguments, **dict(zip(row.arguments, args, strict=False)), **options}
            if one.function is not row.canonical:
                continue
            x = bound.pop("input").clone().requires_grad_()
            function = EXACT_IN_DOUBLE.get(row.canonical, row.canonical)
            (expected,) = torch.autograd.grad(function(x, **bound).sum(), x)
            found = row.values.derivative(x.detach(), {"input": x, **bound})
            torch.testing.assert_close(found, expected, rtol=1e-12 if x.dtype == torch.float64 else 1e-5, atol=1e-12)


def check_proportional_to(row):
    """The result is multiplied by the factor of each such argument."""
    for name in row.product.proportional_to:
        for one in calls_of(row):
            made = drawn(one)
            node = one.bound[name]
            result, _ = result_of(one, made)
            for factor in (-1.7, 0.3):
                assert is_close(result_of(one, {**made, node: made[node] * factor})[0], result * factor)


def check_converts(row):
    if row.entries.converts:
        for signals in (None, between(-9.0, 9.0)):
            for _, result, arguments in results_of_variants(row, signals):
                first = first_of(arguments)
                for tensor in tensors_in(result):
                    assert set(tensor.flatten().tolist()) <= set(first.to(tensor.dtype).flatten().tolist())


def check_view(row):
    """A view shares memory with the first argument in some call, `always_view` in all, and other rows in none."""
    shared = set()
    for strided in (False, True):
        for own in calls_of(row):
            for one in variants(row, own):
                made = drawn(one)
                if strided:  # the same values, in memory with the dimensions in another order
                    made = {node: value.mT.contiguous().mT if value.ndim > 1 else value for node, value in made.items()}
                result, arguments = accepted(one, made)
                first = None if result is None else next(iter(tensors_in(arguments)))
                if first is not None and first.layout is not torch.strided:
                    shared.add(False)  # a sparse tensor shares its memory with no dense one
                    continue
                for tensor in tensors_in(result):
                    if tensor.numel():
                        shared.add(tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr())
    assert shared == {True} if row.memory.always_view else (True in shared) == row.memory.view
    assert row.memory.view or not row.memory.always_view


def check_parts(row):
    """The results are parts of the first argument that do not overlap."""
    if row.outputs.parts:
        for one in calls_of(row):
            result, arguments = result_of(one, drawn(one))
            assert isinstance(result, (tuple, list))
            entries = [entry for tensor in result for entry in tensor.flatten().tolist()]
            assert sorted(entries) == sorted(first_of(arguments).flatten().tolist())


def check_result_per_argument(row):
    if row.outputs.result_per_argument:
        for one in calls_of(row):
            made = drawn(one)
            before, _ = result_of(one, made)
            assert isinstance(before, (tuple, list)) and len(before) == len(made)
            for place, node in enumerate(made):
                after, _ = result_of(one, {**made, node: made[node] + 1})
                assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)] == [
                    other == place for other in range(len(made))
                ]


def check_probability(row):
    """It is torch's function of the logits, or its logarithm."""
    if row.values.probability is None or row.controls:  # shares that other arguments hold are no function of the logits alone
        return
    for scale in (1.0, 5.0):
        for one in calls_of(row):
            result, arguments = result_of(one, drawn(one, between(-scale, scale)))
            logits = -first_of(arguments) if row.values.negates else first_of(arguments)
            expected = [logits.sigmoid()]
            if row.values.probability is Probability.OF_ALL_LOGITS:
                expected = [logits.softmax(dim) for dim in range(logits.ndim)]
            assert any(is_close(result, value) or is_close(result, value.log()) for value in expected)


def check_negates(row):
    """It is another row of its kind, applied to the negated input."""
    if not row.values.negates:
        return
    candidates = [
        other
        for other in table.all_operators()
        if other.kind is row.kind and other.name != row.name and not other.values.negates and other.data == row.data
    ]
    one = calls_of(row)[0]
    made = drawn(one)
    (node,) = one.signals
    expected = result_of(one, made)[0]
    negated = {node: -made[node]}
    found = [accepted(one._replace(function=other.function), negated)[0] for other in candidates]
    assert any(value is not None and is_close(value, expected) for value in found)


def check_logarithm(row):
    if row.values.logarithm:
        for one, result, arguments in results_of_variants(row, between(0.01, 9.0)):
            assert is_close(result, first_of(arguments).log()), one.bound


def check_scales_features(row):
    if row.merging.scales_features:
        assert {"weight", "bias"} <= set(row.parameters)
        (one,) = calls_of(row)
        made = drawn(one)
        weight, bias = one.bound["weight"], one.bound["bias"]
        plain = {**made, weight: torch.ones_like(made[weight]), bias: torch.zeros_like(made[bias])}
        expected, _ = result_of(one, plain)
        assert made[weight].shape == expected.shape[-made[weight].ndim :]
        assert is_close(result_of(one, made)[0], expected * made[weight] + made[bias])


def check_controls(row):
    """Controls are tensors that are neither data nor parameters."""
    for name in row.controls:
        assert name in row.arguments and name not in row.tensors
        given = calls_of(row)[0].bound[name]
        assert given is None or isinstance(given, fx.Node)


def check_scales(row):
    """What may scale a signal is bounded, or positive for the sample's values."""
    for one in calls_of(row):
        if row.values.scales(one.bound) if callable(row.values.scales) else row.values.scales:
            own, _ = result_of(one, drawn(one))
            wide, _ = result_of(one, drawn(one, between(-1e4, 1e4)))
            assert (own > 0).all() or wide.abs().max() <= 10


def check_detached(row):
    """The same values, linear in the input but for the bias: with its scale constant, the derivative gives them back."""
    if row.normalization.detached is None:
        return
    for one in calls_of(row):
        values = drawn(one)
        bound = dict(fx.node.map_arg(one.bound, values.__getitem__))
        assert is_close(row.normalization.detached(bound["input"], bound), result_of(one, values)[0])
        bound["bias"] = None
        x = bound["input"]
        expected = result_of(one._replace(options={**one.options, "bias": None}), values)[0] if "bias" in one.options else None
        if expected is None:
            args = tuple(None if value is one.bound["bias"] else value for value in one.args)
            expected = result_of(one._replace(args=args), values)[0]
        x = x.clone().requires_grad_()
        output = row.normalization.detached(x, bound)
        for _ in range(3):  # <v, J x> = <J^T v, x>
            direction = torch.randn(output.shape)
            pulled = torch.autograd.grad(output, x, direction, retain_graph=True)[0]
            assert is_close((pulled * x).sum(), (direction * expected).sum(), 1e-7)


def check_discrete(row):
    """A discrete result stays the same if the input changes a little."""
    if row.values.discrete and str(row) != "held":  # whose result is taken as a constant
        for one in calls_of(row):
            if row.function is not None and row.sample is not None and one.function is row.sample.function:
                continue  # the sample multiplies a discrete result by a signal
            assert one.signals
            made = drawn(one)
            near = {
                node: made[node] + 1e-9 * torch.randn(made[node].shape) if node in one.signals else made[node] for node in made
            }
            for before, after in zip(tensors_in(result_of(one, made)[0]), tensors_in(result_of(one, near)[0]), strict=True):
                assert torch.equal(before, after)


def check_power(row):
    """It is this power of its input."""
    if row.values.power is not None:
        for one, result, arguments in results_of_variants(row, between(0.1, 3.0)):
            exponent = row.exponent(one.bound)
            if isinstance(exponent, (int, float)):
                assert is_close(result, first_of(arguments) ** exponent), one.bound


def check_steps(row):
    for _, result, _ in results_of_variants(row) if row.values.steps else ():
        assert set(result.unique().tolist()) <= {0, 1}


def check_absorbs(row):
    """Where an operand absorbs, no entry of the other operand changes the result."""
    if row.values.absorbs is None:
        return
    function, others = calls_of(row)[0].function, (torch.zeros(3), torch.ones(3), 7 * torch.rand(3))
    own = torch.tensor([0.0, 1.0, -math.inf])
    found = False
    for operand, varied in ((own, others), (own[:2].bool(), [one[:2].bool() for one in others])):
        results = [accepted_call(function, (operand, other), {}) for other in varied]
        decided = row.values.absorbs(operand)
        found |= bool(decided.any()) and results[0] is not None
        assert results[0] is None or all(torch.equal(one[decided], results[0][decided]) for one in results)
    assert found


def check_keeps_infinity(row):
    if row.values.keeps_infinity:
        for one in calls_of(row):
            made = drawn(one)
            made[one.signals[0]][0] = -math.inf
            assert (result_of(one, made)[0] == -math.inf).flatten()[: made[one.signals[0]][0].numel()].all()


def check_chooses(row):
    if row.entries.chooses:
        for one in calls_of(row):
            made = drawn(one)
            condition, first, second = (made.get(value, value) for value in map(one.bound.get, row.entries.chooses))
            assert torch.equal(result_of(one, made)[0], torch.where(condition, first, second))


def check_fills(row):
    """Entries that are not of the argument are 0, or the number that the call states."""
    for one in calls_of(row) if row.entries.fills is not None else ():
        made = drawn(one, between(2.0, 3.0))
        filled = (
            {0.0} if row.entries.fills is Fill.ZERO else {value for value in one.bound.values() if isinstance(value, float)}
        )
        result, arguments = result_of(one, made)
        others = set(result.flatten().tolist()) - set(first_of(arguments).flatten().tolist())
        assert others == filled or one.bound.get("mode") == "replicate"


def check_repeats(row):
    """Entries again along a dimension: without a copy, the whole after itself, or each after itself."""
    for one in calls_of(row) if row.entries.repeats is not None else ():
        result, arguments = result_of(one, drawn(one))
        source = first_of(arguments)
        count = result.shape[1] // source.shape[1]
        assert count > 1
        assert (result.data_ptr() == source.data_ptr()) == (row.entries.repeats is Repeats.BROADCAST)
        inner = torch.repeat_interleave if row.entries.repeats is Repeats.EACH else torch.Tensor.repeat
        given = (source, count, 1) if row.entries.repeats is Repeats.EACH else (source, 1, count, *[1] * (source.ndim - 2))
        assert torch.equal(result, inner(*given).expand(result.shape))


def check_form(row):
    """The product of its factors, in their order."""
    first, second = torch.rand(2, 3), torch.rand(3, 4)
    given = (second, first) if row.product.reversed else (first, second)
    function = row.function or next(iter(row.spellings.functions), None)
    if row.product.form is Form.SUM:
        assert is_close(function(first[..., None], second[None], 1), first @ second)
    elif row.product.form is not None:
        equation = ("ij,jk->ik",) if row.product.form is Form.EINSUM else ()
        assert is_close(function(*equation, *given), first @ second)


def check_keeps_dimensions(row):
    """A dimension of another size in all operands is the only one that has another size in the result."""
    if not row.dimensions.keeps_dimensions:
        return
    for one in calls_of(row):
        result, arguments = result_of(one, drawn(one))
        rank = tensors_in(arguments)[0].ndim
        assert all(value.ndim == rank for value in tensors_in(result))
        for place in range(rank):
            made = drawn(one)
            made.update({node: made[node].narrow(place, 0, 1) for node in one.signals if made[node].ndim > place})
            for before, after in zip(tensors_in(result), tensors_in(accepted(one, made)[0]), strict=False):
                same = [dim for dim in range(before.ndim) if before.shape[dim] == after.shape[dim]]
                assert set(range(before.ndim)) - {place} <= set(same)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_") and not name.endswith("_of_call")]


@pytest.mark.filterwarnings("ignore")  # of torch, for options that it does not like
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.sampled(3)
def test_facts_of_all_rows_hold(check):
    wrong = []
    for row in ROWS:
        torch.manual_seed(0)
        try:
            check(row)
        except Exception as error:
            wrong.append(f"{row}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)


# --- the checks can fail ------------------------------------------------------------------------------------------------------


def always(claimed):
    return lambda *arguments: claimed


NONNEGATIVE = always(Sign.NONNEGATIVE)
#: Field, a false value, the check that finds it, and rows of which it is false.
FALSE = [
    ("sign", NONNEGATIVE, check_sign, "max amax topk outer dot bilinear lerp gather prod addmm cosine_similarity"),
    ("sign", NONNEGATIVE, check_sign, "scaled_dot_product_attention pow clamp elu layer_norm conv2d sub getitem where"),
    ("adds_up", True, check_adds_up, "diff add relu linear softmax cumprod interpolate max_pool2d"),
    ("multiplies_up", True, check_multiplies_up, "conv2d sum relu mul abs square"),
    ("positive_part", True, check_positive_part, "relu6 gelu softplus abs leaky_relu hardtanh silu"),
    ("keeps_nonpositive", True, check_keeps_nonpositive, "pow remainder exp abs square elu sin clamp softplus maximum"),
    ("channels", lambda channels, bound: channels, check_channels, "max_pool3d adaptive_max_pool3d relu sum softmax sub"),
    ("keeps_rank", True, check_rank, "sum mean std var matmul einsum bilinear max flatten unsqueeze expand stack column_stack"),
    (
        "mixes",
        mixing.no_dimension,
        check_reach,
        "softmax log_softmax layer_norm rms_norm normalize group_norm sort masked_softmax",
    ),
    ("accumulates", mixing.no_dimension, check_reach, "cumsum cumprod cummax linear_recurrence weighted_key_value"),
    ("rank", always(7), check_rank, "conv2d linear relu"),
    ("rank_of", {nn.BatchNorm2d: 5}, check_rank, "batch_norm"),
    ("squeezes", True, check_rank, "layer_norm conv2d matmul relu flatten"),
    ("squeezes", False, check_rank, "squeeze"),
    ("broadcasts", False, check_rank, "pow remainder clamp_min"),
    ("elementwise", True, check_elementwise, "matmul linear conv2d softmax cumsum flip transpose embedding"),
    ("moves", True, check_moves, "neg relu6 gelu add softmax avg_pool2d"),
    ("selects", True, check_selects, "neg relu6 gelu add softmax avg_pool2d logsumexp"),
    ("ratio", lambda x, bound: torch.sigmoid(x), check_ratio, "relu gelu tanh elu square abs"),
    ("derivative", lambda x, bound: torch.sigmoid(x), check_derivative, "relu gelu tanh sigmoid exp square"),
    ("proportional_to", ("input",), check_proportional_to, "add sub pow relu6 tanh"),
    ("proportional_to", ("other",), check_proportional_to, "div quotient sub"),
    ("converts", True, check_converts, "neg relu softmax linear pad round diag_embed"),
    ("view", True, check_view, "linear clone relu _to_copy flip"),
    ("view", False, check_view, "view unfold dropout reshape"),
    ("always_view", True, check_view, "reshape flatten contiguous clone ravel"),
    ("probability", Probability.OF_ALL_LOGITS, check_probability, "relu add sigmoid log exp"),
    ("probability", Probability.OF_ONE_LOGIT, check_probability, "softmax log_softmax hardsigmoid"),
    ("negates", True, check_negates, "softmax linear log_softmax masked_softmax"),
    ("negates", False, check_probability, "softmin"),
    ("logarithm", True, check_logarithm, "log2 log10 log1p exp logit"),
    ("scales_features", True, check_scales_features, "batch_norm group_norm rms_norm linear conv2d"),
    ("dimension_before", lambda place, given, rank: place, check_dimension_before, "conv2d transpose permute unsqueeze select"),
    ("keeps_last_dimension", always(True), check_keeps_last_dimension, "transpose select getitem slice linear roll"),
    ("controls", ("weight",), check_controls, "batch_norm conv2d prelu"),
    ("controls", ("mode",), check_controls, "interpolate pad grid_sample"),
    ("parts", True, check_parts, "flatten relu sort broadcast_tensors"),
    ("result_per_argument", True, check_result_per_argument, "chunk add sort stack"),
    ("scales", 2, check_scales, "conv2d relu linear add gelu"),
    ("power", 2, check_power, "abs relu exp sqrt"),
    ("steps", True, check_steps, "sign floor abs"),
    ("absorbs", torch.logical_not, check_absorbs, "logical_or bitwise_xor add"),
    ("keeps_infinity", True, check_keeps_infinity, "relu exp"),
    ("chooses", ("mask", "input", "value"), check_chooses, "masked_fill"),
    ("fills", Fill.ZERO, check_fills, "roll pad clone"),
    ("repeats", Repeats.TILES, check_repeats, "expand repeat_interleave clone"),
    ("repeats", Repeats.EACH, check_repeats, "tile broadcast_to"),
    ("form", Form.MATRICES, check_form, "mul add"),
    ("reversed", True, check_form, "matmul weighted_einsum"),
    ("keeps_dimensions", True, check_keeps_dimensions, "transpose unsqueeze flatten"),
    ("added", 1, check_dimension_before, "transpose squeeze"),
    ("discrete", True, check_discrete, "relu linear cdist softmax abs sort index embedding"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("field", "claimed", "check", "name"),
    [(field, claimed, check, name) for field, claimed, check, names in FALSE for name in names.split()],
)
def test_false_facts_are_found(field, claimed, check, name):
    row = table.operator_named(name)
    with pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception)):
        check(with_facts(row, **{field: claimed}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "instance_norm"])
def test_a_false_detached_operator_is_found(name):
    row = table.operator_named(name)
    for change in (lambda value, x: value.detach() + 0 * x, lambda value, x: 2 * value):
        with pytest.raises(AssertionError):
            check_detached(
                with_facts(row, detached=lambda x, bound, change=change: change(row.normalization.detached(x, bound), x))
            )
