"""Networks of PP-OCR, which find lines of text and tell which way up they are, with the weights of rapidocr-onnxruntime."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import fx

import lrpfx
from lrpfx.support.optional_packages import optional_package

#: Which way up a line is -> the files of the networks.
CLASSIFIER, DETECTOR = "ch_ppocr_mobile_v2.0_cls_infer", "ch_PP-OCRv4_det_infer"
CATEGORIES = ("upright", "upside down")

_FINAL = ("Sigmoid", "OnnxSoftmaxV1V11", "OnnxCopyIdentity")


def load(name: str = CLASSIFIER) -> fx.GraphModule:
    """A network in evaluation mode, without the sigmoid or softmax at its end.

    It takes pictures (batch, 3, height, width) from -1 to 1, of 48 × 192 pixels for the `CLASSIFIER`. It needs onnx, onnx2torch
    and the files of rapidocr-onnxruntime.
    """
    onnx = optional_package("onnx", "lrpfx.demo.text_lines")
    onnx2torch = optional_package("onnx2torch", "lrpfx.demo.text_lines")
    found = importlib.util.find_spec("rapidocr_onnxruntime")  # not imported: it needs OpenCV
    if found is None or not found.submodule_search_locations:
        raise lrpfx.InputError(
            "lrpfx.demo.text_lines needs the files of rapidocr_onnxruntime: pip install --no-deps rapidocr-onnxruntime",
            topic="missing-package",
        )
    model = onnx.load(Path(found.submodule_search_locations[0]) / "models" / f"{name}.onnx")
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    for node in constants:  # weights stand in nodes; onnx2torch looks for them among the initializers
        node.attribute[0].t.name = node.output[0]
        model.graph.initializer.append(node.attribute[0].t)
        model.graph.node.remove(node)
    module: fx.GraphModule = onnx2torch.convert(model).eval()
    output, last = module.graph.output_node(), module.graph.output_node().all_input_nodes
    while type(module.get_submodule(str(last[0].target))).__name__ in _FINAL:
        last = last[0].all_input_nodes
    output.args = (last[0],)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def drawn(text: str, width: int = 192, height: int = 48) -> torch.Tensor:
    """Black text on white from -1 to 1, (3, height, width)."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).text((4, height // 5), text, fill="black", font=ImageFont.load_default(0.6 * height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
