"""The compiler's graph passes, and the driver that runs them.

A pass has a name and a stage. Its result holds the number of matches, and the reason for each candidate that it left alone. A
pass only edits a `Program`; the driver lints and verifies the graph, records the history and writes dumps.
"""

from lrpfx.ir.final_probabilities import final_probabilities, final_softmax
from lrpfx.passes.analyze.infer_signs import AnalyzeSigns
from lrpfx.passes.analyze.infer_support import AnalyzeSupport
from lrpfx.passes.assign import Assign
from lrpfx.passes.canonize.explain_logits import ExplainLogits
from lrpfx.passes.canonize.merge_batch_norm import MergeBatchNormLeft
from lrpfx.passes.canonize.merge_batch_norm_right import MergeBatchNormRight
from lrpfx.passes.canonize.merge_input_normalization import MergeInputNormalization
from lrpfx.passes.canonize.merge_layer_norm import MergeLayerNorm
from lrpfx.passes.driver import Verification, record, run_pass
from lrpfx.passes.normalize.decompose import Decompose
from lrpfx.passes.normalize.find_gates import FindGates
from lrpfx.passes.normalize.normalize_operators import NormalizeOperators
from lrpfx.passes.normalize.remove_dead_code import RemoveDeadCode
from lrpfx.passes.normalize.remove_dropout import RemoveDropout
from lrpfx.passes.normalize.remove_inplace import RemoveInplace
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.rewrite.fold import Fold
from lrpfx.passes.rewrite.rewrite import Rewrite
from lrpfx.passes.validate import Validate
from lrpfx.runtime.compiled_graph import PassRecord

__all__ = [
    "AnalyzeSigns",
    "AnalyzeSupport",
    "Assign",
    "Decompose",
    "ExplainLogits",
    "FindGates",
    "Fold",
    "GraphPass",
    "MergeBatchNormLeft",
    "MergeBatchNormRight",
    "MergeInputNormalization",
    "MergeLayerNorm",
    "NormalizeOperators",
    "PassRecord",
    "PassResult",
    "Program",
    "RemoveDeadCode",
    "RemoveDropout",
    "RemoveInplace",
    "Rewrite",
    "Validate",
    "Verification",
    "final_probabilities",
    "final_softmax",
    "record",
    "run_pass",
]
