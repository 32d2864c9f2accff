"""The compiler's stages in order, and the passes of each stage. Code that runs a stage takes its passes from here."""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lrpfx.ir.mapping import RuleMapping
from lrpfx.passes.analyze.infer_signs import AnalyzeSigns, InputRange
from lrpfx.passes.analyze.infer_support import AnalyzeSupport
from lrpfx.passes.assign import Assign
from lrpfx.passes.canonize.explain_logits import ExplainLogits
from lrpfx.passes.canonize.find_batch_norm import FindBatchNorm
from lrpfx.passes.canonize.merge_batch_norm import MergeBatchNormLeft
from lrpfx.passes.canonize.merge_batch_norm_right import MergeBatchNormRight
from lrpfx.passes.canonize.merge_padding import MergePadding
from lrpfx.passes.canonize.merge_parts import MergeParts
from lrpfx.passes.canonize.merge_pieces import MergePieces
from lrpfx.passes.canonize.merge_scales import MergeScales
from lrpfx.passes.canonize.separate_constants import SeparateConstants
from lrpfx.passes.lower.derive_weights import DeriveWeights
from lrpfx.passes.lower.drop_detach import DropDetach
from lrpfx.passes.lower.name_tensors import NameTensors
from lrpfx.passes.lower.out_of_place import OutOfPlace
from lrpfx.passes.lower.plain_sizes import PlainSizes
from lrpfx.passes.lower.plain_views import PlainViews
from lrpfx.passes.normalize.decompose import Decompose
from lrpfx.passes.normalize.find_activations import FindActivations, FindGatedProducts
from lrpfx.passes.normalize.find_attention import FindAttention
from lrpfx.passes.normalize.find_gates import FindGates
from lrpfx.passes.normalize.find_linear import FindLinear
from lrpfx.passes.normalize.find_recurrent import FindRecurrent
from lrpfx.passes.normalize.find_softmax import FindSoftmax
from lrpfx.passes.normalize.find_straight_through import FindStraightThrough
from lrpfx.passes.normalize.fold_masks import FoldMasks
from lrpfx.passes.normalize.normalize_operators import NormalizeOperators
from lrpfx.passes.normalize.remove_dead_code import RemoveDeadCode
from lrpfx.passes.normalize.remove_dropout import RemoveDropout
from lrpfx.passes.normalize.remove_inplace import RemoveInplace
from lrpfx.passes.normalize.settle_sizes import SettleSizes
from lrpfx.passes.normalize.simplify import Simplify
from lrpfx.passes.normalize.split_complex_numbers import SplitComplexNumbers
from lrpfx.passes.normalize.undo_decompositions import UndoDecompositions
from lrpfx.passes.program import GraphPass
from lrpfx.passes.rewrite.carry_multipliers import CarryMultipliers
from lrpfx.passes.rewrite.checkpoint_blocks import CheckpointBlocks
from lrpfx.passes.rewrite.choose_shortcuts import ChooseShortcuts
from lrpfx.passes.rewrite.cut_constants import CutConstants
from lrpfx.passes.rewrite.fold import Fold
from lrpfx.passes.rewrite.follow_choices import FollowChoices
from lrpfx.passes.rewrite.fuse_attention import FuseAttention
from lrpfx.passes.rewrite.pair_with_reference import PairWithReference
from lrpfx.passes.rewrite.rewrite import Rewrite
from lrpfx.passes.rewrite.save_less import SaveLess
from lrpfx.passes.validate import Validate
from lrpfx.runtime.explain_module import ExplainModule

OUTPUT, LOGITS = "output", "logits"  # values of `Settings.explain`: the output to explain


@dataclass(frozen=True)
class Settings:
    """The options of `lrpfx.transform` that passes depend on."""

    composite: RuleMapping | None = None
    canonizers: Sequence[GraphPass] = ()  # passes requested by the composite's canonizers
    constants: Collection[str] = ()
    input_range: InputRange = None
    keep_gradient: bool = False
    explain: str = OUTPUT
    fold: bool = True
    optimize: bool = True
    checkpoint: Sequence[str] = ()  # patterns of the paths of modules
    module: ExplainModule | None = None  # the explainable module that is lowered
    legalize: Sequence[type[GraphPass]] = ()  # passes that write a lowered program in the operators of a backend


class Stage(enum.Enum):
    """The stages after CAPTURE: those of `lrpfx.transform`, then those of `lrpfx.lower` and of backends."""

    NORMALIZE = "normalize"
    CANONIZE = "canonize"
    ASSIGN = "assign"
    VALIDATE = "validate"
    ANALYZE = "analyze"
    REWRITE = "rewrite"
    FOLD = "fold"
    FUSE = "fuse"
    LOWER = "lower"
    LEGALIZE = "legalize"


def asked_canonizers(settings: Settings) -> list[GraphPass]:
    """The last passes of CANONIZE, which depend on the composite and on what is to be explained."""
    return [*settings.canonizers, *([ExplainLogits()] if settings.explain == LOGITS else [])]


#: The passes of each stage, in execution order.
STAGES: dict[Stage, Callable[[Settings], Sequence[GraphPass]]] = {
    Stage.NORMALIZE: lambda settings: (
        UndoDecompositions(),
        SettleSizes(),
        NormalizeOperators(settings.constants),
        RemoveInplace(),
        RemoveDropout(),
        FoldMasks(),
        FindStraightThrough(),
        FindActivations(),
        Decompose(),
        SplitComplexNumbers(),
        Simplify(),
        FindGatedProducts(),
        FindLinear(),
        FindSoftmax(),
        FindRecurrent(),
        RemoveDeadCode(),
        FindGates(),
        FindAttention(),
    ),
    Stage.CANONIZE: lambda settings: (
        MergePadding(),
        MergeScales(),
        MergePieces(),
        MergePadding(),
        MergeScales(),
        FindBatchNorm(),
        MergeParts(),
        SeparateConstants(),
        MergeBatchNormLeft(),
        MergeScales(),
        MergeBatchNormRight(),
        *asked_canonizers(settings),
    ),
    Stage.ASSIGN: lambda settings: (Assign(settings.composite),) if settings.composite is not None else (),
    Stage.VALIDATE: lambda settings: (Validate(settings.keep_gradient),),
    Stage.ANALYZE: lambda settings: (AnalyzeSigns(settings.input_range), AnalyzeSupport()),
    Stage.REWRITE: lambda settings: (
        FollowChoices(),
        PairWithReference(),
        CarryMultipliers(only_differences=not (settings.optimize and settings.fold)),
        *([ChooseShortcuts()] if settings.optimize else []),
        Rewrite(differentiable=not settings.fold),
        CutConstants(),
        *([SaveLess()] if settings.optimize and settings.fold else []),
    ),
    Stage.FOLD: lambda settings: (Fold(),) if settings.fold else (),
    Stage.FUSE: lambda settings: (
        *([FuseAttention()] if settings.optimize and settings.fold else []),
        *([CheckpointBlocks(settings.checkpoint)] if settings.checkpoint else []),
    ),
    Stage.LOWER: lambda settings: (
        (DropDetach(), OutOfPlace(), PlainViews(), PlainSizes(), NameTensors(settings.module), DeriveWeights(settings.module))
        if settings.module
        else ()
    ),
    Stage.LEGALIZE: lambda settings: [step() for step in settings.legalize],
}


def passes_of(settings: Settings, *stages: Stage) -> list[GraphPass]:
    """The passes of the given stages, in order."""
    return [step for stage in stages for step in STAGES[stage](settings)]
