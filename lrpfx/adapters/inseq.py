"""LRP as an attribution method of inseq, under the name "lrp". Needs inseq: pip install 'lrpfx[inseq]'."""

from typing import Any

import torch

from lrpfx.attribution.compute import attribute
from lrpfx.composites import AttnLRP, Composite
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pipeline import transform
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.optional_packages import optional_package

__all__ = ["LRPAttribution"]

_methods = optional_package("inseq.attr.feat.gradient_attribution", "lrpfx.adapters.inseq", extra="inseq")
_steps = optional_package("inseq.attr.step_functions", "lrpfx.adapters.inseq", extra="inseq")
_Registry: Any = _methods.GradientAttributionRegistry

#: What relevance explains, in inseq's words.
LOGIT = "logit"


class LRPAttribution(_Registry):
    """LRP by lrpfx as an attribution method of inseq: relevance of all tokens before each generated one.

    To import this module registers it: `inseq.load_model(model, "lrp", tokenizer=...)`. The model is compiled at the first
    token of each call of inseq's `attribute`. Relevance explains logits, so this asks for `attributed_fn="logit"`; its sum over
    the features of a token is `aggregate("sum", normalize=False)` of inseq's output.

    Parameters
    ----------
    attribution_model
        The causal language model, as inseq holds it.
    composite
        The rules.
    **options
        Ignored, as by other methods of inseq.

    Raises
    ------
    InputError
        The model has an encoder and a decoder.
    InputTypeError
        The composite is none.
    """

    method_name = "lrp"

    def __init__(self, attribution_model: Any, composite: Composite | None = None, **options: Any) -> None:
        super().__init__(attribution_model, hook_to_model=False)
        if attribution_model is not None and attribution_model.is_encoder_decoder:
            raise InputError("the method lrp explains causal language models, and this one has an encoder", topic="sentences")
        self.attribute_batch_ids = True
        self.forward_batch_embeds = False
        self.use_baselines = False
        self.composite = AttnLRP() if composite is None else composite
        if not isinstance(self.composite, Composite):
            raise InputTypeError(f"composite is one of lrpfx, not a {type(composite).__name__}", topic="composites")
        self._explain_model: ExplainModule | None = None

    def prepare_and_attribute(self, *arguments: Any, **options: Any) -> Any:
        """One call of inseq's `attribute`, for the model as it is now.

        Parameters
        ----------
        *arguments, **options
            What inseq passes.
        """
        self._explain_model = None
        try:
            return super().prepare_and_attribute(*arguments, **options)
        finally:
            self._explain_model = None

    def attribute_step(self, attribute_fn_main_args: dict[str, Any], attribution_args: dict[str, Any] | None = None) -> Any:
        """Relevance for one generated token of each sample, as inseq's steps return it.

        Parameters
        ----------
        attribute_fn_main_args
            What inseq passes: ids, targets, the function that is explained, and the mask of attention.
        attribution_args
            Arguments of other methods.

        Raises
        ------
        InputError
            Something other than logits is to be explained; and as for `lrpfx.transform` and `lrpfx.attribute`.
        """
        ids, targets, explained, mask, *_ = attribute_fn_main_args["additional_forward_args"]
        if explained is not _steps.STEP_SCORES_MAP[LOGIT]:
            name = next((name for name, one in _steps.STEP_SCORES_MAP.items() if one is explained), repr(explained))
            raise InputError(
                f"relevance explains logits, and inseq asks for {name!r}: pass attributed_fn={LOGIT!r} to attribute",
                topic="targets",
            )
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
        if self._explain_model is None:
            self._explain_model = transform(self.attribution_model.model, self.composite, inputs)
        found = attribute(self._explain_model, inputs, [(-1, token) for token in targets.flatten().tolist()])
        of_source, of_target = _methods.get_source_target_attributions((found.relevance["input_ids"],), False)
        return _methods.GranularFeatureAttributionStepOutput(
            source_attributions=of_source, target_attributions=of_target, step_scores={}
        )
