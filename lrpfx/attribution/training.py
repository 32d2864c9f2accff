"""Gradients of what depends on relevance, for training: each derivative in the context that it needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lrpfx.attribution.arguments import Arguments, Inputs, embeddings_of, misfits
from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.explained_output import explained_output
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike, as_target
from lrpfx.runtime.explain_module import ExplainModule

#: A function of the explained output and the relevance of the inputs, which returns a tensor with one number.
Objective = Callable[[torch.Tensor, Any], torch.Tensor]


def backward_through_relevance(
    explain_model: nn.Module,
    inputs: Inputs,
    objective: Objective,
    target: TargetLike = None,
    *,
    output: OutputSelector = None,
) -> torch.Tensor:
    """Add the gradient of an objective, which reads relevance, to that of the parameters: for training with a penalty.

    Relevance is computed while the rules act, and the objective and its gradient while they do not. With other derivatives in
    place of these, a penalty is computed of what is no relevance, or has no effect: this function allows for none. The
    gradient is added to `.grad` of the parameters of `explain_model` that require one, as `backward` does [1]_.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform(model, composite, fold=False)`. Train its parameters; with `share=True`, they share the
        memory of the model's. Merged batch norms keep their statistics, and dropout does nothing.
    inputs
        As for `lrpfx.attribute`, without integers that embeddings look up.
    objective
        A function of the explained output, (batch, ...), and the relevance of the inputs, in their structure and shapes. It
        returns a tensor with one number: the loss and a penalty, for example. Relevance depends on the parameters as it does in
        `lrpfx.attribute`: that of a class sums to its output.
    target, output
        As for `lrpfx.attribute`.

    Returns
    -------
    torch.Tensor
        What the objective returned, without its graph.

    Raises
    ------
    InputError
        The module was transformed with `fold=True`; the call is inside of `explain_model.inactive()`; gradients are disabled;
        no parameter requires a gradient; or the objective does not depend on the relevance, as after `detach()`.
    InputTypeError
        The module is none that `lrpfx.transform` made, was compiled, or the objective returns something else.

    References
    ----------
    .. [1] Ross et al. 2017, https://doi.org/10.24963/ijcai.2017/371, with gradients in place of relevance
    .. [2] Weber et al. 2023, https://doi.org/10.1016/j.inffus.2022.11.013, a review

    Examples
    --------
    >>> live = lrpfx.transform(model, lrpfx.composites.EpsilonPlus(), fold=False)
    >>> loss = lrpfx.backward_through_relevance(live, x, lambda output, relevance: relevance.square().mean(), target=1)
    >>> live.get_parameter("0.weight").grad.shape
    torch.Size([4, 3, 3, 3])
    """
    if not isinstance(explain_model, ExplainModule):
        raise InputTypeError(
            "backward_through_relevance takes the module that lrpfx.transform(model, composite, fold=False) returns, not "
            f"compiled, and not {type(explain_model).__name__}",
            topic="explainable-module",
        )
    trained = _trained(explain_model)
    arguments = Arguments(inputs, explain_model)
    arguments.admit(explain_model)
    looked_up = [name for names in embeddings_of(explain_model, arguments).values() for name in names]
    if looked_up:
        raise InputError(
            f"relevance of integers is that of the embedding {looked_up[0]}, which has no derivative here: give the model "
            "vectors, such as `inputs_embeds`, in place of integers",
            topic="derivative-of-relevance",
        )
    chosen = as_target(target)
    with explain_model.with_rules():
        with misfits(explain_model, arguments):
            result = arguments.call(explain_model)
        explained = explained_output(result, output)
        chosen.check(explained.value.detach(), explained.chosen)
        start = chosen.relevance(explained.value)  # with its graph: it is part of the relevance
        relevances = torch.autograd.grad(explained.value, arguments.leaves, start, create_graph=True, materialize_grads=True)
    with explain_model.inactive():
        value = objective(explained.value, arguments.in_form(relevances, {}))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputTypeError(
                f"the objective returns a tensor with one number, not {found}", topic="derivative-of-relevance"
            )
        live = [relevance for relevance in relevances if relevance.requires_grad]
        reached = value.requires_grad and any(
            one is not None for one in torch.autograd.grad(value, live, retain_graph=True, allow_unused=True)
        )
        if not reached:
            raise InputError(
                "the objective does not depend on the relevance that it got, so a penalty has no effect: compute it of the "
                "second argument by operations of torch, without detach(), item() or no_grad(). What lrpfx.attribute returns "
                "has no graph",
                topic="derivative-of-relevance",
            )
        value.backward(inputs=trained)
    return value.detach()


def _trained(module: ExplainModule) -> list[nn.Parameter]:
    """The parameters that get a gradient. Raises `InputError` where no derivative of relevance is possible."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise InputError(
            "gradients are disabled: call it outside of torch.no_grad() and torch.inference_mode()",
            topic="derivative-of-relevance",
        )
    with module.inactive():  # which says what is missing
        found = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not found:
        raise InputError(
            "no parameter requires a gradient: call requires_grad_() of those to train", topic="derivative-of-relevance"
        )
    return found
