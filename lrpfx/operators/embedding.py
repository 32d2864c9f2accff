"""Embeddings: lookup of vectors."""

from torch import nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Operator
from lrpfx.operators.functions import embedding_bag
from lrpfx.operators.row import row
from lrpfx.operators.samples import Fixed, call, weight

ROWS: tuple[Operator, ...] = (
    row(
        "embedding",
        kinds.Embedding,
        functional.embedding,
        "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
        parameters="weight",
        indices="input",
        aliases="indices=input",
        modules=[nn.Embedding],
        order="weight input padding_idx scale_grad_by_freq sparse",
        sample=call(
            input=Fixed([[1, 2], [3, 0]]),
            weight=weight(5, 4),
            padding_idx=0,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            sparse=False,
        ),
    ),
    row(
        "embedding_bag",
        kinds.Embedding,
        embedding_bag,
        "input weight offsets=None max_norm=None norm_type=2.0 scale_grad_by_freq=False mode='mean' sparse=False "
        "per_sample_weights=None include_last_offset=False padding_idx=None",
        parameters="weight",
        modules=[nn.EmbeddingBag],
        spelled="",
        functions=[functional.embedding_bag],
        indices="input offsets",
        aliases="indices=input",
        controls="per_sample_weights",
        sample=call(input=Fixed([[1, 2], [3, 0]]), weight=weight(5, 4)),
    ),
)
