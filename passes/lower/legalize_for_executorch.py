"""Express a lowered program in operators that ExecuTorch computes, and computes right."""

from torch import fx

from lrpfx.passes.lower.forward_forms import WITHOUT_ALPHA, WITHOUT_NEGATIVE_PADDING
from lrpfx.passes.lower.legalize_for_onnx import Forms, LegalizeForOnnx


class LegalizeForExecuTorch(LegalizeForOnnx):
    """Replace operators that ONNX lacks, which ExecuTorch mostly lacks too, and factors of sums, which it may misplace.

    Paddings by negative amounts, which it does not compute, become slices.
    """

    name = "legalize_for_executorch"
    target = "ExecuTorch"

    def forms(self, graph: fx.Graph) -> Forms:
        return {**super().forms(graph), **WITHOUT_ALPHA, **WITHOUT_NEGATIVE_PADDING}
