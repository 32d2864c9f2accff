"""The compiler's stages, one graph pass per file.

A pass has a name, a stage and a result that says how many places it matched and why it left the others alone. It edits the
graph of a `Program` and nothing else: the driver lints, records the history, verifies and dumps.
"""

from .analyze_signs import AnalyzeSigns
from .analyze_support import AnalyzeSupport
from .assign import Assign
from .capture_export import capture_export, capture_program
from .capture_symbolic import capture_copy, capture_symbolic, private_copy
from .decompose import Decompose
from .dequantize import dequantized
from .driver import Verification, record, run_pass
from .explain_logits import ExplainLogits, final_softmax
from .find_gates import FindGates
from .fold import Fold
from .merge_batch_norm import MergeBatchNorm
from .merge_right import MergeBatchNormRight, MergeInputNormalization, MergeLayerNorm
from .normalize_operators import NormalizeOperators
from .program import Pass, PassResult, Program, Stage
from .remove_dead_code import RemoveDeadCode
from .remove_dropout import RemoveDropout
from .remove_inplace import RemoveInplace
from .rewrite import Rewrite
from .validate import Validate

__all__ = [
    "AnalyzeSigns",
    "AnalyzeSupport",
    "Assign",
    "Decompose",
    "ExplainLogits",
    "FindGates",
    "Fold",
    "MergeBatchNorm",
    "MergeBatchNormRight",
    "MergeInputNormalization",
    "MergeLayerNorm",
    "NormalizeOperators",
    "Pass",
    "PassResult",
    "Program",
    "RemoveDeadCode",
    "RemoveDropout",
    "RemoveInplace",
    "Rewrite",
    "Stage",
    "Validate",
    "Verification",
    "capture_copy",
    "capture_export",
    "capture_program",
    "capture_symbolic",
    "dequantized",
    "final_softmax",
    "private_copy",
    "record",
    "run_pass",
]
