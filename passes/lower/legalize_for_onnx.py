"""Express a lowered program in operators that ONNX supports."""

import torch

from lrpfx.errors import LoweringError
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import EXPORTED, ONNX_OPERATORS
from lrpfx.support.torch_internals import decompositions_of_backwards


class LegalizeForOnnx(GraphPass):
    """Replace operators that ONNX lacks, mainly backward operators. `LoweringError` if torch cannot replace them."""

    name = "legalize_for_onnx"
    stage = "legalize"
    requires = (EXPORTED,)
    ensures = (ONNX_OPERATORS,)

    def run(self, program: Program) -> PassResult:
        known = {**decompositions_of_backwards(), **FORWARD_FORMS}
        own = torch.export.default_decompositions()  # torch.onnx applies these itself
        matches = sum(node.target in known and node.target not in own for node in program.graph.nodes)
        if not matches:
            return PassResult()  # without a run, which takes as long as the translation
        try:
            exported = program.program().run_decompositions(known)
        except Exception as error:
            raise LoweringError(
                f"the program cannot be expressed in ONNX operators: {type(error).__name__}: {error}"
            ) from error
        program.root, program.graph, program.exported = exported.graph_module, exported.graph, exported
        return PassResult(matches)
