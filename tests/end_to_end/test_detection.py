"""A detector as it comes: RT-DETR of transformers, whose decoder samples the features at places that it refines."""

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from helpers import assert_close

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.rules import Pass
from lrpfx.types import Detach

transformers = pytest.importorskip("transformers")


def rt_detr():
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[16, 24, 32],
        encoder_hidden_dim=16,
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=10,
        num_denoising=0,
        decoder_in_channels=[16, 16, 16],
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_attention_heads=2,
        decoder_n_points=2,
        num_labels=4,
    )
    model = transformers.RTDetrForObjectDetection(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 10)  # biases that matter
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*functions of their own")  # the inverse of a sigmoid is a logarithm
@pytest.mark.parametrize("composite", [EpsilonPlus, AttnLRP])
def test_the_logit_of_a_class(composite):
    model, image = rt_detr(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image).logits
    explain_model = lrpfx.transform(model, composite(layer_map=[(Detach, Pass())]), example_inputs={"pixel_values": image})
    found = lrpfx.attribute(explain_model, image, (3, 1))
    assert_close(found.output, expected, 1e-12)
    assert found.relevance.any()
    accounts = lrpfx.ledger(explain_model, image, (3, 1))
    assert abs(accounts.balance) <= 1e-9 and accounts.unexplained <= 1e-9
