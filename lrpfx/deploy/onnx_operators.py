"""The operators of ONNX that .onnx files may call, and the limits of what they compute.

`lrpfx.save` writes files in these operators: none of them repeats others, draws, calls a function, or belongs to a runtime. The
size of every value is derived before a runtime reads a file, since a small file may ask for any amount of memory.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lrpfx.support.stored_arrays import RefusedError

_NAMES = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Col2Im Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose
    Cos Cosh CumSum DFT DepthToSpace DequantizeLinear Div DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand Flatten
    Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool Greater GreaterOrEqual GridSample GroupNormalization
    HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow QuantizeLinear
    RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin
    Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK
    Transpose Trilu Unsqueeze Where Xor
"""
#: Names of operators in ONNX's own domain.
NAMES = frozenset(_NAMES.split())

#: Operators whose results may be sizes of others; they are computed if their arguments are known and small.
_NAMES_OF_SIZES = """
    Add Cast Ceil Concat Constant Div Equal Floor Gather Identity Max Min Mod Mul Neg Range ReduceMax ReduceMin ReduceProd
    ReduceSum Reshape Shape Size Slice Sqrt Squeeze Sub Unsqueeze Where
"""
_OF_SIZES = frozenset(_NAMES_OF_SIZES.split())
_SMALL = 1024  # entries of values that may be sizes
_MOST_ROUNDS = 32  # of inference, each of which may give sizes that the next one needs

#: Kinds of whole numbers, as ONNX numbers them, whose least number divided by -1 ends the process -> that number.
DIVIDED = {6: -(2**31), 7: -(2**63)}

#: A value has at most this many times the bytes of the file and of the program's arguments, or this many bytes.
MOST_MADE = 64, 2**28
#: All values that depend on no argument, which runtimes compute when they load a file, together.
MOST_FOLDED = 32, 2**28
#: The products of numbers that computing these values takes. Runtimes may keep them all at once, but not those of matrices.
MOST_PRODUCTS, _KEPT_OF_MATRICES = (64, 2**28), 1 / 256


def check_operators(model: Any) -> None:
    """Raise `RefusedError` for a model of other operators, with functions, or with graphs inside of operators."""
    domains = {one.domain for one in (*model.opset_import, *model.graph.node)} - {"", "ai.onnx"}
    if model.functions or model.training_info or model.graph.sparse_initializer or domains:
        raise RefusedError(f"its model has functions, or operators of {', '.join(sorted(map(repr, domains))) or 'its own'}")
    for node in model.graph.node:
        if node.op_type not in NAMES:
            raise RefusedError(f"its model calls {node.op_type}, which lrpfx does not write")
        if any(one.HasField("g") or one.graphs or one.ref_attr_name for one in node.attribute):
            raise RefusedError(f"its model has a graph inside of {node.op_type}")


def check_sizes(model: Any, shapes: Mapping[str, Sequence[int]], length: int) -> None:
    """Raise `RefusedError` if a value of a checked model is too large for a file of `length` bytes, or its size is unknown.

    `shapes`: those of the arguments, with which the sizes are derived.
    """
    if {one.name for one in model.graph.input} != set(shapes):
        raise RefusedError("its model does not have the arguments of its manifest")
    for one in model.graph.initializer:
        if math.prod(one.dims) > 8 * one.ByteSize() and not one.external_data:
            raise RefusedError(f"{one.name} is larger than its data in the file")
    sizes, kinds, dimensions = _derived(model, shapes)
    _check_divisions(model, kinds)
    given = length + sum(sizes[name] for name in shapes)
    folded, products, constants = 0, 0.0, {one.name for one in model.graph.initializer}
    for node in model.graph.node:
        results = [name for name in node.output if name]
        for name in results:
            size = sizes.get(name)
            if size is None:
                raise RefusedError(f"the size of {name}, which {node.op_type} computes, cannot be derived")
            if size > max(MOST_MADE[0] * given, MOST_MADE[1]):
                raise RefusedError(f"{node.op_type} computes {size:.1e} bytes, too many for a file of this size")
        if all(name in constants for name in node.input if name):
            constants.update(results)
            folded += sum(sizes[name] for name in results)
            products += _products(node, dimensions)
    if folded > MOST_FOLDED[0] * length + MOST_FOLDED[1]:
        raise RefusedError(f"a runtime would compute {folded:.1e} bytes to load it, too many for a file of this size")
    if products > MOST_PRODUCTS[0] * length + MOST_PRODUCTS[1]:
        raise RefusedError(f"a runtime would compute {products:.1e} products to load it, too many for a file of this size")


#: Operators that compute each entry from windows of their attribute `kernel_shape`, or from all entries of some dimensions.
_OF_WINDOWS = {"AveragePool", "MaxPool"}
_OF_PAIRS = {"DFT", "Resize", "GridSample", "Col2Im", "LRN", "TopK", "CumSum", "Trilu", "OneHot", "GatherND", "ScatterND"}


def _products(node: Any, dimensions: Mapping[str, Sequence[int]]) -> float:
    """How many products of numbers a node computes and keeps at most, for the shapes of values."""
    shapes, result = [tuple(dimensions[name]) for name in node.input if name], tuple(dimensions[node.output[0]])
    entries, made = [math.prod(one) for one in shapes], math.prod(result)
    if node.op_type in ("MatMul", "Gemm", "MatMulInteger"):
        return made * max(shapes[0], default=1) * _KEPT_OF_MATRICES
    if node.op_type in ("Conv", "ConvInteger"):
        return float(made * (entries[1] // max(shapes[1][0], 1)))
    if node.op_type == "ConvTranspose":
        return float(entries[0] * (entries[1] // max(shapes[1][0], 1)))
    if node.op_type == "Einsum":
        return float(math.prod(entries))
    if node.op_type in _OF_WINDOWS:
        return float(made * math.prod(next((one.ints for one in node.attribute if one.name == "kernel_shape"), [math.inf])))
    if node.op_type in _OF_PAIRS:
        return float(made * max(max(one, default=1) for one in (*shapes, result)))
    return float(made + sum(entries))


def _check_divisions(model: Any, kinds: Mapping[str, int]) -> None:
    """Raise `RefusedError` for a division of whole numbers that may divide the least one by -1, which ends the process.

    The divisor must be a stored number other than 0 and -1, or the dividend the larger of a value and a stored number.
    """
    import onnx
    from onnx import numpy_helper

    replaced = {one.name for one in model.graph.input}  # by arguments, whatever is stored
    stored: dict[str, list[int]] = {}
    for one in model.graph.initializer:
        if kinds[one.name] in DIVIDED and math.prod(one.dims) == 1 and not one.external_data and one.name not in replaced:
            stored.setdefault(one.name, []).append(numpy_helper.to_array(one).item())
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        if node.op_type not in ("Div", "Mod"):
            continue
        if node.output[0] not in kinds:
            raise RefusedError(f"the kind of {node.output[0]}, which {node.op_type} computes, cannot be derived")
        least = DIVIDED.get(kinds[node.output[0]])
        if least is None or (node.input[1] in stored and not {0, -1}.intersection(stored[node.input[1]])):
            continue
        maker = makers.get(node.input[0])
        limits = maker.input if maker is not None and maker.op_type == "Max" else ()
        if not any(name in stored and min(stored[name]) > least for name in limits):
            kind = onnx.TensorProto.DataType.Name(kinds[node.output[0]])
            raise RefusedError(
                f"its model has a {node.op_type} of {kind} whose divisor may be -1 and whose dividend has no limit"
            )


def _derived(
    model: Any, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], dict[str, int], dict[str, Sequence[int]]]:
    """The bytes of each value whose shape can be derived, the kinds of entries as ONNX numbers them, and the shapes."""
    import onnx
    from onnx import helper, numpy_helper

    lean = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    lean.graph.name = "sizes"
    lean.graph.node.extend(model.graph.node)
    for one in model.graph.output:
        lean.graph.output.add().name = one.name
    for one in model.graph.input:
        kind = one.type.tensor_type.elem_type
        lean.graph.input.append(helper.make_tensor_value_info(one.name, kind, shapes[one.name]))
    values: dict[str, Any] = {}
    kinds: dict[str, int] = {one.name: one.data_type for one in model.graph.initializer}
    for one in model.graph.initializer:
        if math.prod(one.dims) <= _SMALL and not one.external_data:
            lean.graph.initializer.append(one)
            values[one.name] = numpy_helper.to_array(one)
        else:  # inference needs its shape only
            lean.graph.input.append(helper.make_tensor_value_info(one.name, one.data_type, one.dims))
    sizes: dict[str, int] = {}
    dimensions: dict[str, Sequence[int]] = {}
    for _ in range(_MOST_ROUNDS):
        for node in lean.graph.node:
            _check_numbers(node, values)
        # without `data_prop`, which reads and allocates where a number in the file says
        inferred = onnx.shape_inference.infer_shapes(lean).graph
        known = {one.name: one.type.tensor_type for one in (*inferred.input, *inferred.value_info, *inferred.output)}
        kinds |= {name: one.elem_type for name, one in known.items() if one.elem_type}  # unknown after its value is known
        derived = ((name, _dimensions(one)) for name, one in known.items())
        found = {name: shape for name, shape in derived if shape is not None}
        dimensions |= found
        remaining = []
        for node in lean.graph.node:
            value = _value_of(node, values, found)
            if value is None:
                remaining.append(node)
            else:
                values[node.output[0]] = value
                lean.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        sizes = {name: math.prod(found[name]) * _bytes_of_entry(known[name].elem_type) for name in found}
        if len(remaining) == len(lean.graph.node):
            break
        del lean.graph.node[:]
        lean.graph.node.extend(remaining)
    return (
        {**sizes, **{name: value.nbytes for name, value in values.items()}},
        kinds,
        dimensions | {name: value.shape for name, value in values.items()},
    )


#: Operator -> the argument with its axes. onnx reads out of range for axes that a value does not have.
_AXES = {"Pad": 3, "Slice": 3, "Squeeze": 1, "Unsqueeze": 1}
_MOST_AXES, _LARGEST = 64, 2**31  # of a value, and of a number in an attribute or a step


def _check_numbers(node: Any, values: Mapping[str, Any]) -> None:
    """Raise `RefusedError` for numbers for which onnx would end the process."""
    numbers = [number for one in node.attribute for number in (one.i, *one.ints)]
    outputs = [one.i for one in node.attribute if one.name == "num_outputs"]
    axes_stated = [one.i for one in node.attribute if one.name in ("axis", "batch_dims")]
    place = 1 if node.op_type.startswith("Reduce") else _AXES.get(node.op_type)
    axes = values.get(node.input[place]) if place is not None and len(node.input) > place else None
    steps = values.get(node.input[4]) if node.op_type == "Slice" and len(node.input) > 4 else None
    valid = (
        all(-_LARGEST < number < _LARGEST for number in numbers)
        and outputs in ([], [len(node.output)])
        and all((0 if node.op_type == "GatherND" else -_MOST_AXES) <= number <= _MOST_AXES for number in axes_stated)
        and (axes is None or bool((abs(axes.astype(float)) <= _MOST_AXES).all()))
        and (steps is None or bool((abs(steps.astype(float)) < _LARGEST).all() and steps.all()))
    )
    if not valid:
        raise RefusedError(f"its model calls {node.op_type} with numbers out of range")


def _dimensions(kind: Any) -> list[int] | None:
    """The dimensions of a tensor type, or None if one is unknown."""
    dimensions = [one.dim_value for one in kind.shape.dim if one.HasField("dim_value") and one.dim_value >= 0]
    return dimensions if kind.HasField("shape") and len(dimensions) == len(kind.shape.dim) else None


def _bytes_of_entry(kind: int) -> int:
    from onnx import helper

    return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)


def _value_of(node: Any, values: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Any:
    """The result of an operation on sizes as an array, or None if it is unknown, not small, or of another operation."""
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    if node.op_type not in _OF_SIZES or len(node.output) != 1:
        return None
    inputs: dict[str, Any] = {name: values.get(name) for name in node.input if name}
    if node.op_type in ("Shape", "Size") and node.input[0] in shapes:
        inputs = {node.input[0]: np.broadcast_to(np.zeros(1, np.int8), shapes[node.input[0]])}  # takes no memory
    if any(value is None for value in inputs.values()):
        return None
    if node.op_type == "Range":
        start, limit, step = (float(inputs[name]) for name in node.input)
        if not step or not (limit - start) / step <= _SMALL:
            return None
    try:
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(node).run(None, inputs)
    except Exception:  # the runtime would refuse it, too
        return None
    return np.asarray(value) if np.size(value) <= _SMALL else None
