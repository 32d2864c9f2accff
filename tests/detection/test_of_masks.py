"""Segmenters of queries: their map of classes is that of a loop over places, and relevance is that of a seed by hand."""

import numpy as np
import pytest
import torch
from helpers import assert_close
from PIL import Image
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.detection import semantic_map
from lrpfx.detection.of_masks import logits_at_places
from lrpfx.errors import InputError
from lrpfx.request.places import scores_of_classes

transformers = pytest.importorskip("transformers")

STAGES = ["stage1", "stage2", "stage3", "stage4"]
SWIN = {"image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 2, 2, 2], "window_size": 2}
SWIN["out_features"] = STAGES
SIZES = {"mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32, "dim_feedforward": 32}
HEADS = {"num_attention_heads": 2, "num_queries": 6, "encoder_layers": 1, "decoder_layers": 2}
NAMES = {0: "ground", 1: "cat", 2: "dog"}


def mask2former():
    settings = {**SIZES, **HEADS, "feature_size": 32, "id2label": NAMES}
    config = transformers.Mask2FormerConfig(backbone_config=transformers.SwinConfig(**SWIN), **settings)
    return transformers.Mask2FormerForUniversalSegmentation(config)


def maskformer():
    decoder = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6}
    attention = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    settings = {"fpn_feature_size": 32, "mask_feature_size": 32, "id2label": NAMES}
    config = transformers.MaskFormerConfig(
        backbone_config=transformers.MaskFormerSwinConfig(**SWIN),
        decoder_config=transformers.DetrConfig(**decoder, **attention),
        **settings,
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def oneformer():
    text = {"text_encoder_width": 32, "text_encoder_num_layers": 1, "text_encoder_n_ctx": 2, "text_encoder_vocab_size": 40}
    lengths = {"text_encoder_context_length": 8, "task_seq_len": 8}
    settings = {**SIZES, **HEADS, **text, **lengths, "conv_dim": 32, "mask_dim": 32, "query_dec_layers": 1, "id2label": NAMES}
    config = transformers.OneFormerConfig(backbone_config=transformers.SwinConfig(**SWIN), **settings)
    return transformers.OneFormerForUniversalSegmentation(config)


def eomt():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_blocks": 2, "num_upscale_blocks": 1}
    settings = {"image_size": 64, "patch_size": 16, "num_queries": 6, "id2label": NAMES}
    return transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**sizes, **settings))


FAMILIES = {"Mask2Former": mask2former, "MaskFormer": maskformer, "OneFormer": oneformer, "EoMT": eomt}


def made(name):
    """A segmenter with random weights whose queries have several classes and masks."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    if name == "EoMT":
        model.attn_mask_probs.zero_()  # as after its training; with masks, transformers' kernels differ in float64
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "quer" in path and "embed" in path + "features":
                parameter.copy_(torch.randn_like(parameter) * 3)
        x, states = torch.rand(1, 3, 64, 64), []
        classes = next(one for path, one in model.named_modules() if path.endswith(("class_predictor", "class_embed")))
        handle = classes.register_forward_hook(lambda module, inputs, output: states.append(inputs[0]))
        model(pixel_values=x, **further_of(name))
        handle.remove()
        common = nn.functional.normalize(states[-1].flatten(0, 1).mean(0), dim=0)
        weight = torch.randn_like(classes.weight)
        classes.weight.copy_(weight - (weight @ common)[:, None] * common)  # what tells queries apart
    return model


def further_of(name):
    return {"task_inputs": torch.arange(8)[None] + 3} if name == "OneFormer" else {}


class Raw(nn.Module):
    """The logits of classes and masks in one row."""

    def __init__(self, segmenter, further):
        super().__init__()
        self.segmenter, self.further = segmenter, further

    def forward(self, images):
        result = self.segmenter(pixel_values=images, **self.further)
        return torch.cat([result.class_queries_logits.flatten(1), result.masks_queries_logits.flatten(1)], 1)


def by_hand(logits, masks):
    """The map of one image, and the query of each place: logits (queries, classes + 1), masks (queries, rows, columns)."""
    likely = logits.softmax(1)[:, :-1].max(1).values
    _, rows, columns = masks.shape
    found, queries = torch.zeros(logits.shape[1] - 1, rows, columns), {}
    for row in range(rows):
        for column in range(columns):
            query = max(range(len(masks)), key=lambda one: float(likely[one] * masks[one, row, column].sigmoid()))
            queries[row, column] = query
            found[:, row, column] = logits[query, :-1] + masks[query, row, column]
    return found, queries


@pytest.mark.filterwarnings("ignore:.*functions of their own")  # attention is written as products
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_map_and_its_relevance_are_those_by_hand(name):
    segmenter, further, x = made(name), further_of(name), torch.rand(2, 3, 64, 64)
    raw = Raw(segmenter, {key: one.expand(2, -1) for key, one in further.items()})
    whole = semantic_map(segmenter, **further)
    with torch.no_grad():
        output, rows = whole(x), raw(x)
    explain_model, itself = (lrpfx.transform(one, AttnLRP(), x) for one in (whole, raw.eval()))
    seeds = {1: torch.zeros_like(rows), 2: torch.zeros_like(rows)}
    used = set()
    for sample in range(2):
        logits, masks = rows[sample, : 6 * 4].view(6, 4), rows[sample, 6 * 4 :].view(6, *output.shape[2:])
        expected, queries = by_hand(logits, masks)
        used |= set(queries.values())
        assert_close(output[sample], expected, 1e-12)
        classes = expected.argmax(0)
        for (row, column), query in queries.items():
            index = int(classes[row, column])
            if index in seeds and expected[index, row, column] > 0:
                seeds[index][sample, 4 * query + index] += logits[query, index]
                place = (query * output.shape[2] + row) * output.shape[3] + column
                seeds[index][sample, 6 * 4 + place] += masks[query, row, column]
    assert len(used) > 1
    compared = 0
    for index, seed in seeds.items():
        if seed.any():
            expected = lrpfx.attribute(itself, x, seed).relevance
            assert expected.any()
            assert_close(lrpfx.attribute(explain_model, x, lrpfx.Region(index)).relevance, expected, 1e-8)
            compared += 1
    assert compared


class Places(nn.Module):
    """Maps of queries from images, whose classes are given."""

    def __init__(self):
        super().__init__()
        self.masks, self.classes = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(3, 6 * 4)

    def forward(self, images):
        return logits_at_places(self.classes(images.mean((2, 3))).view(-1, 6, 4), self.masks(images))


def test_places_belong_to_one_query():
    torch.manual_seed(1)
    model, x = Places().eval(), torch.rand(2, 3, 12, 16)
    nn.init.normal_(model.masks.weight, std=2.0)  # so that several queries have places
    explain_model, output = lrpfx.transform(model, EpsilonPlus(), x), model(x).detach()
    for one, found in zip(x, output, strict=True):
        logits, masks = model.classes(one.mean((1, 2))).view(6, 4), model.masks(one[None])[0]
        expected, queries = by_hand(logits.detach(), masks.detach())
        assert_close(found, expected, 1e-12)
        assert len(set(queries.values())) > 1
    assert_close(explain_model(x[:1, :, :10, :14]), model(x[:1, :, :10, :14]), 1e-12)
    collection = lrpfx.concepts.collect(explain_model, [*x], ["masks"], target=lrpfx.Region(1), top=2, normalize=[])
    recorded = lrpfx.attribute(explain_model, x, lrpfx.Region(1), record=["masks"]).layers["masks"].flatten(2).sum(2)
    for one in collection.top("masks", 0, by="relevance", reduction="sum"):
        assert one.score == pytest.approx(float(recorded[one.sample, 0]), rel=1e-5)
    accounts = lrpfx.ledger(explain_model, x, 1)
    assert accounts.seed == pytest.approx(float((output[:, 1].clamp(min=0) * (output.argmax(1) == 1)).sum()))
    assert accounts.seed > 0 and accounts.unexplained < 1e-12


def test_what_is_no_segmenter_of_queries_is_refused():
    with pytest.raises(lrpfx.InputError, match="Linear is none of Mask2Former"):
        semantic_map(nn.Linear(2, 2))
    with pytest.raises(lrpfx.InputError, match=r"semantic_map\(model, task_inputs=\.\.\.\)"):
        lrpfx.Explainer(made("OneFormer"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*functions of their own")
def test_through_the_front_door(tmp_path):
    segmenter = made("MaskFormer").float()
    explainer = lrpfx.Explainer(segmenter, preprocess=preprocess)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 96, 3), dtype=np.uint8)
    photograph = Image.fromarray(pixels)
    photograph.save(tmp_path / "photo.png")
    found = explainer(photograph)
    output = semantic_map(segmenter)(found.input[None]).detach()
    assert explainer.categories == ("ground", "cat", "dog") and found.relevance.shape == (48, 96)
    best = scores_of_classes(output)[0]
    assert found.target.name == explainer.categories[int(best.argmax())]
    assert found.target.score == pytest.approx(float(best.max()), rel=1e-4)
    mask = np.zeros((48, 96), dtype=bool)
    mask[:, :48] = True
    half = explainer(photograph, lrpfx.Region("dog", mask, positive=False))
    assert half.target.score == pytest.approx(float(output[0, 2, :, : output.shape[3] // 2].sum()), rel=1e-4)
    assert half.overlay().size == (96, 48) and abs(half.ledger.unexplained) < 1e-3 * abs(half.ledger.seed)
    view = lrpfx.datasets.attribute(explainer, tmp_path, tmp_path / "store", target="predicted")
    assert_close(torch.tensor(view["relevance"][0]).double(), torch.tensor(found.input_relevance).double(), 1e-2)
    program = lrpfx.lower(explainer.explain_model, found.input[None], target=lrpfx.Region(2, None), dynamic_batch=False)
    direct = lrpfx.attribute(explainer.explain_model, found.input[None], lrpfx.Region(2, None)).relevance
    assert_close(program.module()(found.input[None])["relevance"], direct, 1e-4)


def preprocess(image):
    return torch.from_numpy(np.asarray(image.convert("RGB").resize((64, 64))).copy()).permute(2, 0, 1).float() / 255


def test_random_masks_in_evaluation_mode():
    model = made("EoMT").float()
    model.attn_mask_probs.fill_(0.5)
    with pytest.raises(InputError, match=r"draws at random.*attn_mask_probs.fill_\(0\)"):
        lrpfx.Explainer(model)
    with pytest.raises(lrpfx.CaptureError, match=r"rand \(.*modeling_eomt.py:\d+\) draws random numbers.*evaluation mode"):
        lrpfx.transform(model, EpsilonPlus(), torch.rand(1, 3, 64, 64))
