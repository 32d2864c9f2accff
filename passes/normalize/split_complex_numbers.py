"""NORMALIZE: compute with the real and the imaginary parts of complex numbers, since relevance belongs to real numbers.

The relevance of a complex value z consists of that of Re z and that of Im z. With multipliers m, it is Re(conj(z) m) in total,
the real inner product, and the derivatives of torch are those with respect to the two parts. A graph of real operations has all
of this by itself, and each operation in it has the rule that it has when the author writes the parts out.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import fx

from lrpfx.errors import UnsupportedOperationError
from lrpfx.ir.kinds import AvgPool, Convolution, Interpolation, Linear, MatMul, Sum
from lrpfx.ir.node import (
    NodeInfo,
    Role,
    attribute_of,
    map_arguments,
    node_info,
    nodes_in,
    output_node,
    role_from,
    row_of,
)
from lrpfx.ir.operator import Operator
from lrpfx.operators.complex_numbers import fourier, short_time_waves
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, OUT_OF_PLACE
from lrpfx.support.dotted_paths import dotted_path
from lrpfx.support.torch_internals import OpOverload

#: A real value, or the real and imaginary parts of a complex one; a part may be a number.
Parts = tuple[Any, Any]

#: Names of arguments that hold values, other than the first: a number there has an imaginary part of zero.
_VALUES = frozenset({"value", "values", "source", "other", "input"})

_REMEDY = (
    "Relevance belongs to real numbers: write this step with the real and imaginary parts, z.real and z.imag, and make complex "
    "numbers of the results by torch.complex"
)


class _NoPartsError(Exception):
    """The reason why an operation cannot be written with real and imaginary parts; "" if none is known."""


class SplitComplexNumbers(GraphPass):
    """Replace each complex signal by its real and its imaginary part.

    Transforms take and return pairs. Operations that move values apply to both parts, and so do sums. A product of two complex
    values is four real products. The magnitude is the norm of the two parts. `UnsupportedOperationError` lists all others.
    """

    name = "split_complex_numbers"
    stage = "normalize"
    requires = (CANONICAL, OUT_OF_PLACE, DECOMPOSED)

    def applies(self, program: Program) -> bool:
        kinds = _Kinds(program)
        return any(kinds.is_complex(node) for node in program.graph.nodes)

    def run(self, program: Program) -> PassResult:
        return _Splitting(program).run()


class _Kinds:
    """Which values of a graph are complex."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[fx.Node, bool] = {}

    def is_complex(self, value: Any) -> bool:
        if isinstance(value, complex):
            return True
        if not isinstance(value, fx.Node):
            return False
        if value not in self.known:
            self.known[value] = self._find(value)
        return self.known[value]

    def _find(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return bool(getattr(attribute_of(node, self.program.root), "is_complex", bool)())
        if node.op == "output":
            return False
        info = node_info(node)
        if info.dtype is not None:
            return info.dtype.is_complex
        row = info.operator
        if node.target is getattr or (row is not None and row.values.discrete):
            return False
        if row is not None and row.linear.transforms and "return_complex" in node.kwargs:
            return bool(node.kwargs["return_complex"])
        if row is not None and row.values.returns_complex is not None:
            return row.values.returns_complex
        dtypes = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, torch.dtype)]
        if dtypes:
            return dtypes[0].is_complex
        found: list[bool] = []
        map_arguments((node.args, node.kwargs), lambda leaf: found.append(self.is_complex(leaf)))
        return any(found)


class _Splitting:
    """The work of the pass on one graph."""

    def __init__(self, program: Program) -> None:
        self.graph = program.graph
        self.kinds = _Kinds(program)
        self.parts: dict[fx.Node, Parts] = {}  # complex calls -> their parts
        self.constants: dict[fx.Node, Parts] = {}  # other complex values -> their parts
        self.whole: dict[fx.Node, fx.Node] = {}  # complex calls -> the same, made of their parts
        self.node: fx.Node = output_node(program.graph)  # the call that is replaced
        self.magnitudes: dict[Any, Parts] = {}  # of these parts
        self.taken: set[str] = set()  # names of calls that the pass has made

    def run(self) -> PassResult:
        result, problems = PassResult(), []
        for node in list(self.graph.nodes):
            if node.op == "output" or (node.op.startswith("call") and node_info(node).role is not Role.DATA):
                for value in [one for one in node.all_input_nodes if one in self.parts]:
                    node.replace_input_with(value, self._as_a_whole(value, node))
            elif node.op.startswith("call") and (_squared(node) in self.magnitudes or self._concerns(node)):
                self.node = node
                try:
                    replacement = self._replacement(node)
                except _NoPartsError as reason:
                    problems.append(_complaint(node, str(reason)))
                    replacement = (node, node)  # an error follows
                result.match(node_info(node).name, "computes with real and imaginary parts")
                if isinstance(replacement, tuple):
                    self.parts[node] = replacement
                else:
                    node.replace_all_uses_with(replacement)
                    self.graph.erase_node(node)
        if problems:
            raise UnsupportedOperationError(
                f"{len(problems)} operation(s) compute with complex numbers in a way that has no rule:\n" + "\n".join(problems)
            )
        for node in reversed(list(self.parts)):
            self.graph.erase_node(node)
        return result

    def _concerns(self, node: fx.Node) -> bool:
        row = node_info(node).operator
        if row is not None and row.name == "rotated":  # pairs, times complex numbers
            return False
        return any(map(self.kinds.is_complex, (node, *_leaves(node))))

    # --- values

    def _parts_of(self, value: Any) -> Parts:
        """The parts of an argument; the imaginary part is 0 for a real one."""
        if not isinstance(value, fx.Node):
            return (value.real, value.imag) if isinstance(value, complex) else (value, 0)
        if value in self.parts:
            return self.parts[value]
        if not self.kinds.is_complex(value):
            return value, 0
        if value not in self.constants:
            self.constants[value] = self._call("real", value), self._call("imag", value)
        return self.constants[value]

    def _as_a_whole(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """A complex value made of its parts, for the output and for what reads its shape or compares it."""
        if value not in self.whole:
            self.node = before
            parts = self._tensors(self.parts[value])
            self.whole[value] = self._call("complex", *parts, info=node_info(value))
        return self.whole[value]

    def _tensors(self, parts: Parts) -> list[fx.Node]:
        """Both parts as tensors: a number becomes one of the other part's shape."""
        present = next(part for part in parts if isinstance(part, fx.Node))
        return [part if isinstance(part, fx.Node) else self._filled(present, part) for part in parts]

    def _filled(self, like: fx.Node, value: Any) -> fx.Node:
        """A tensor of one number."""
        info = NodeInfo(self._name("full_like"), source=node_info(like).source, role=Role.METADATA)
        return insert_call(self.graph, self.node, torch.full_like, (like, value), info)

    def _stacked(self, parts: Parts, info: NodeInfo | None = None) -> fx.Node:
        """The parts as pairs, in the last dimension."""
        return self._call("stack", self._tensors(parts), -1, target=torch.stack, info=info)

    def _unstacked(self, pairs: Any) -> Parts:
        infos = [NodeInfo(self._name(part), source=node_info(self.node).source, description=part) for part in ("real", "imag")]
        real, imaginary = (
            self._call("select", pairs, -1, place, target=torch.select, info=info) for place, info in enumerate(infos)
        )
        return real, imaginary

    def _name(self, what: str) -> str:
        own = f"{'output' if self.node.op == 'output' else node_info(self.node).name}.{what}"
        name = next(name for name in chain([own], (f"{own}_{number}" for number in count(1))) if name not in self.taken)
        self.taken.add(name)
        return name

    def _call(self, name: str, *args: Any, target: Any = None, info: NodeInfo | None = None, **options: Any) -> fx.Node:
        """Insert a call of a listed operator before the call that is replaced. With `info`, it stands for that call."""
        row = operator_named(name)
        if info is None:
            source = "" if self.node.op == "output" else node_info(self.node).source
            info = NodeInfo(self._name(name), source=source, description=name)
        role = role_from(nodes_in((args, options)))
        info = replace(info, operator=row, unlisted=None, role=role, shape=None, dtype=None)
        made = insert_call(self.graph, self.node, target or row.canonical, args, info, options)
        self.kinds.known[made] = name == "complex"
        return made

    # --- arithmetic of parts, without what is zero

    def _sum(self, first: Any, second: Any) -> Any:
        if not isinstance(first, fx.Node) and not isinstance(second, fx.Node):
            return first + second
        if _is_zero(first) or _is_zero(second):
            return second if _is_zero(first) else first
        return self._call("add", *((first, second) if isinstance(first, fx.Node) else (second, first)))

    def _difference(self, first: Any, second: Any) -> Any:
        if _is_zero(second):
            return first
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            return self._call("sub", first, second)
        return self._sum(first, self._negative(second))

    def _negative(self, value: Any) -> Any:
        return self._call("neg", value) if isinstance(value, fx.Node) else -value

    def _product(self, first: Any, second: Any) -> Any:
        if not isinstance(first, fx.Node) and not isinstance(second, fx.Node):
            return first * second
        if _is_zero(first) or _is_zero(second):
            return 0
        value, factor = (first, second) if isinstance(first, fx.Node) else (second, first)
        if not isinstance(factor, fx.Node) and factor == -1:
            return self._negative(value)
        return value if not isinstance(factor, fx.Node) and factor == 1 else self._call("mul", value, factor)

    def _times(self, first: Any, second: Any) -> Parts:
        """A product. That with a complex constant is one layer, a rotation of pairs."""
        for value, constant in ((first, second), (second, first)):
            both = isinstance(constant, fx.Node) and all(map(self.kinds.is_complex, (value, constant)))
            if both and node_info(constant).role is not Role.DATA:
                return self._unstacked(self._call("rotated", self._stacked(self._parts_of(value)), constant))
        (a, b), (c, d) = self._parts_of(first), self._parts_of(second)
        real = self._difference(self._product(a, c), self._product(b, d))
        return real, self._sum(self._product(a, d), self._product(b, c))

    # --- operations

    def _replacement(self, node: fx.Node) -> fx.Node | Parts:
        row = node_info(node).operator
        if row is None:
            raise _NoPartsError
        if _squared(node) in self.magnitudes:  # a power, whose sum has one stabilizer
            squares = [self._call("square", part) for part in self.magnitudes[_squared(node)]]
            return self._call("add", *squares, info=node_info(node))
        given = {**row.arguments, **bound_arguments(node, row)} if row.arguments else {}
        if row.name in _OWN:
            return _OWN[row.name](self, given)
        if row.name in ("add", "sub", "rsub"):
            return self._added(row, given)
        if row.linear.transforms:
            return self._transformed(node)
        if issubclass(row.kind, (MatMul, Linear, Convolution)):
            return self._bilinear(node, given.get("bias"))
        sums = issubclass(row.kind, (Sum, AvgPool, Interpolation))
        if sums or (row.neutral and (row.entries.moves or row.entries.selects or row.entries.converts or row.memory.view)):
            return self._part_by_part(node, row)
        raise _NoPartsError

    def _node_of(self, part: Any, value: fx.Node) -> fx.Node:
        """A part of a value, under the name of the call that takes it."""
        if not isinstance(part, fx.Node):
            part = self._tensors(self._parts_of(value))[1]
        return self._call("alias", part, target=torch.ops.aten.alias.default, info=node_info(self.node))

    def _magnitude(self, value: Any) -> fx.Node:
        parts = self._tensors(self._parts_of(value))
        made = self._call("norm", self._stacked((parts[0], parts[1])), 2, -1, target=torch.norm, info=node_info(self.node))
        self.magnitudes[made] = parts[0], parts[1]
        return made

    def _angle(self, value: Any) -> fx.Node:
        real, imaginary = self._tensors(self._parts_of(value))
        return self._call("atan2", imaginary, real, info=node_info(self.node))

    def _exponential(self, value: Any) -> Parts:
        real, imaginary = self._parts_of(value)
        magnitude = 1 if _is_zero(real) else self._call("exp", real)
        cosine, sine = (self._call(name, imaginary) for name in ("cos", "sin"))
        return self._product(magnitude, cosine), self._product(magnitude, sine)

    def _power(self, value: Any, exponent: Any) -> Parts:
        if isinstance(exponent, fx.Node) or exponent != 2:
            raise _NoPartsError("only the exponent 2 is known")
        return self._times(value, value)

    def _conjugated(self, value: Any) -> Parts:
        real, imaginary = self._parts_of(value)
        return real, self._negative(imaginary)

    def _quotient(self, given: dict[str, Any]) -> Parts:
        divisor = given["other"]
        if self.kinds.is_complex(divisor):
            raise _NoPartsError("its divisor is complex; multiply by the conjugate, and divide by the squared magnitude")
        real, imaginary = (
            self._call("div", part, divisor)
            if isinstance(part, fx.Node)
            else self._product(part, self._call("reciprocal", divisor))
            for part in self._parts_of(given["input"])
        )
        return real, imaginary

    def _added(self, row: Operator, given: dict[str, Any]) -> Parts:
        if isinstance(given["alpha"], complex):
            raise _NoPartsError("its argument 'alpha' is complex")
        factors = () if row.merging.coefficients is None else row.merging.coefficients(given["alpha"])
        own, other = (
            [self._product(part, factor) for part in self._parts_of(given[name])]
            for name, factor in zip(("input", "other"), factors, strict=True)
        )
        return self._sum(own[0], other[0]), self._sum(own[1], other[1])

    def _transformed(self, node: fx.Node) -> fx.Node | Parts:
        value, *args = node.args
        if any(node_info(one).role is Role.DATA for one in nodes_in((args, node.kwargs))):
            raise _NoPartsError("its window or a size depends on the model's input")
        assert isinstance(value, fx.Node) and callable(node.target)
        layer = self._short_time(node, value)
        if layer is not None:
            return layer
        of_pairs = self.kinds.is_complex(value)
        given = self._stacked(self._parts_of(value)) if of_pairs else value
        path = dotted_path(node.target)
        made = self._call("fourier", path, given, of_pairs, *args, target=fourier, info=node_info(node), **node.kwargs)
        return self._unstacked(made) if self.kinds.is_complex(node) else made

    def _short_time(self, node: fx.Node, value: fx.Node) -> Parts | None:
        """The parts of a short-time Fourier transform, which is a convolution of a signal with a window's waves."""
        overload = node.target if isinstance(node.target, OpOverload) else torch.ops.aten.stft.center
        names = [argument.name for argument in overload._schema.arguments]
        given: dict[str, Any] = {"center": "center" in names, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        size, window, shape = given.get("n_fft"), given.get("window"), node_info(value).shape
        if not isinstance(size, int):
            return None
        hop = given.get("hop_length") or size // 4
        known = isinstance(hop, int) and shape is not None and len(shape) == 2
        if row_of(node).name != "stft" or not known or not given.get("return_complex") or self.kinds.is_complex(value):
            return None
        if window is None:
            even = NodeInfo(self._name("window"), source=node_info(node).source, role=Role.METADATA)
            sizes = ((given.get("win_length") or size,),)
            window = insert_call(self.graph, self.node, torch.Tensor.new_ones, (value, *sizes), even)
        if not isinstance(window, fx.Node) or node_info(window).role not in (Role.PARAMETER, Role.METADATA):
            return None
        signal = self._call("unsqueeze", value, 1, target=torch.unsqueeze)
        if given["center"]:
            signal = self._call("pad", signal, (size // 2, size // 2), given.get("pad_mode", "reflect"))
        onesided = given.get("onesided") is not False
        info = NodeInfo(self._name("waves"), source=node_info(node).source, role=node_info(window).role)
        waves = insert_call(
            self.graph, self.node, short_time_waves, (window, size, bool(given.get("normalized")), onesided), info
        )
        both = self._call("conv1d", signal, waves, info=replace(node_info(node), description="stft"), stride=hop)
        halves = self._call("chunk", both, 2, 1, target=torch.chunk)
        real, imaginary = (self._call("getitem", halves, place, target=operator.getitem) for place in (0, 1))
        return real, imaginary

    def _bilinear(self, node: fx.Node, bias: fx.Node | None) -> Parts:
        """A product of two operands: each part of the one with each part of the other."""
        operands = [leaf for leaf in nodes_in((node.args, node.kwargs)) if leaf is not bias]
        if getattr(node.target, "__name__", "").startswith("vdot"):
            raise _NoPartsError("it conjugates its first operand; use .conj() and torch.dot")
        if len(operands) != 2:
            raise _NoPartsError("it is no product of two operands")
        (a, b), (c, d) = map(self._parts_of, operands)
        of_bias = (None, None) if bias is None else self._parts_of(bias)

        def product(first: Any, second: Any, added: Any = None) -> Any:
            if _is_zero(first) or _is_zero(second):
                return 0
            remaining = iter((first, second))

            def put(leaf: Any) -> Any:
                if not isinstance(leaf, fx.Node):
                    return leaf
                return (added if isinstance(added, fx.Node) else None) if leaf is bias else next(remaining)

            args, kwargs = map_arguments((node.args, dict(node.kwargs)), put)
            return self._call(row_of(node).name, *args, target=node.target, **kwargs)

        real = self._difference(product(a, c, of_bias[0]), product(b, d))
        if _is_zero(d):
            return real, product(b, c, of_bias[1])
        return real, self._sum(product(a, d, of_bias[1]), product(b, c))

    def _part_by_part(self, node: fx.Node, row: Operator) -> Parts:
        """The same call for each part. Numbers and real tensors among the values have an imaginary part of zero."""
        dtypes = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, torch.dtype)]
        if any(not dtype.is_complex for dtype in dtypes) or (dtypes and not row.entries.converts):
            raise _NoPartsError("it changes the dtype; for a real number, write .real")
        named = {name for name in row.arguments if name in row.data or name in _VALUES} - set(row.indices)

        def copied(part: int) -> fx.Node:
            def put(leaf: Any) -> Any:
                if isinstance(leaf, torch.dtype):
                    return leaf.to_real()
                concerned = isinstance(leaf, fx.Node) and (self.kinds.is_complex(leaf) or node_info(leaf).role is Role.DATA)
                return self._part(leaf, part) if concerned else leaf

            def put_value(leaf: Any) -> Any:
                return put(leaf) if isinstance(leaf, torch.dtype) else self._part(leaf, part)

            if row.arguments:
                bound = bound_arguments(node, row)
                for name in bound.keys() - named:
                    if any(map(self.kinds.is_complex, nodes_in(bound[name]))):
                        raise _NoPartsError(f"its argument {name!r} is complex")
                given = {name: map_arguments(value, put_value if name in named else put) for name, value in bound.items()}
                leading = [given.pop(name) for name in row.arguments if name in row.tensors and name in given]
                return self._call(row.name, *leading, target=node.target, **given)
            first = map_arguments(node.args[0], put_value)
            others, kwargs = map_arguments((node.args[1:], dict(node.kwargs)), put)
            return self._call(row.name, first, *others, target=node.target, **kwargs)

        is_adjoint = getattr(node.target, "__name__", "").startswith(("adjoint", "mH", "matrix_H"))
        return copied(0), self._negative(copied(1)) if is_adjoint else copied(1)

    def _part(self, value: Any, part: int) -> Any:
        """A part of a value: a tensor where the value is a tensor."""
        found = self._parts_of(value)
        return self._tensors(found)[part] if isinstance(value, fx.Node) else found[part]


#: What becomes of calls of these rows, from their arguments.
_OWN: dict[str, Callable[[_Splitting, dict[str, Any]], "fx.Node | Parts"]] = {
    "view_as_complex": lambda split, given: split._unstacked(given["input"]),
    "view_as_real": lambda split, given: split._stacked(split._parts_of(given["input"]), node_info(split.node)),
    "complex": lambda split, given: (given["real"], given["imag"]),
    "real": lambda split, given: split._node_of(split._parts_of(given["input"])[0], given["input"]),
    "imag": lambda split, given: split._node_of(split._parts_of(given["input"])[1], given["input"]),
    "conj": lambda split, given: split._conjugated(split.node.args[0]),
    "neg": lambda split, given: split._times(given["input"], -1),
    "abs": lambda split, given: split._magnitude(given["input"]),
    "angle": lambda split, given: split._angle(given["input"]),
    "exp": lambda split, given: split._exponential(given["input"]),
    "square": lambda split, given: split._times(given["input"], given["input"]),
    "pow": lambda split, given: split._power(given["input"], given["exponent"]),
    "mul": lambda split, given: split._times(given["input"], given["other"]),
    "div": lambda split, given: split._quotient(given),
}


def _leaves(node: fx.Node) -> list[Any]:
    """What a call is given, without containers."""
    found: list[Any] = []
    map_arguments((node.args, dict(node.kwargs)), found.append)
    return found


def _squared(node: fx.Node) -> Any:
    """The value of which a call is the square, or None."""
    row, first = node_info(node).operator, next(iter(node.args), None)
    if row is None:
        return None
    by_itself = row.name == "mul" and len(node.args) == 2 and node.args[1] is first
    return first if by_itself or row.exponent(bound_arguments(node, row)) == 2 else None


def _is_zero(part: Any) -> bool:
    return not isinstance(part, fx.Node) and part == 0


def _complaint(node: fx.Node, reason: str) -> str:
    info = node_info(node)
    what = info.operator or info.description or getattr(node.target, "__name__", str(node.target))
    because = f": {reason}" if reason else ""
    return f"  {info.name}: {what}, at {info.source or 'an unknown place'}{because}. {_REMEDY}."
