"""Write a smaller .onnx file of lrpfx: with weights in float16, or with dense layers and products in int8.

    python shrink.py model.onnx small.onnx float16 | int8

The smaller file keeps the self-test: check.py measures how much the results change. `lrpfx sign small.onnx --tolerance 0.05`
makes it a file that lrpfx loads, if they change by at most this.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SMALLEST = 1024  # bytes of a weight that is worth an operation


def with_float16_weights(model):
    """The model with its weights in float16, from which a runtime makes float32 when it loads the file."""
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or tensor.external_data or 4 * np.prod(tensor.dims) < SMALLEST:
            continue
        values = numpy_helper.to_array(tensor)
        if abs(values).max() > np.finfo(np.float16).max:
            continue
        casts.append(helper.make_node("Cast", [f"{tensor.name}.float16"], [tensor.name], to=TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{tensor.name}.float16"))
    others = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *others])
    return model


def with_int8_products(model, operators=("MatMul", "Gemm")):
    """The model with products in int8, whose scales ONNX Runtime measures in each call. Other values stay in float32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/model.onnx")
        quantize_dynamic(
            f"{folder}/model.onnx", f"{folder}/small.onnx", op_types_to_quantize=list(operators), weight_type=QuantType.QUInt8
        )
        return onnx.load(f"{folder}/small.onnx")


def with_notes(model, original):
    """The model with the notes of the original: its manifest, its self-test and a hash, which is no longer right."""
    del model.metadata_props[:]
    model.metadata_props.extend(original.metadata_props)
    return model


FORMS = {"float16": with_float16_weights, "int8": with_int8_products}


def main(path, smaller, form):
    original = onnx.load(path)
    onnx.save(with_notes(FORMS[form](onnx.load(path)), original), smaller)
    print(f"{Path(path).stat().st_size / 1e6:.1f} MB -> {Path(smaller).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
