"""An image with a text: shares of both, and the image's relevance on its own pixels, beside the relevance of the inputs."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision
from images.test_entry_places import photograph, pixels_of_patches, smoothed
from PIL import Image

import lrpfx
from lrpfx.composites import CPLRP
from lrpfx.errors import InputError, InputTypeError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "what", "is", "this", "a", "cat", "dog", "in", "the", "picture", "?"]
OF_TEXT = {
    **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None},
}


def tokenizer(*marks):
    words = {word: number for number, word in enumerate([*WORDS, *marks])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    given = {"unk_token": "<unk>", "additional_special_tokens": list(marks)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **given)


@pytest.fixture(scope="module")
def llava():
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    marks = {"image_token": "<image>", "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    images = transformers.CLIPImageProcessor(**sizes)
    processor = transformers.LlavaProcessor(images, tokenizer("<image>"), patch_size=8, **marks)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "vision_config": transformers.CLIPVisionConfig(**vision, image_size=32, patch_size=8),
        "text_config": transformers.LlamaConfig(**{**OF_TEXT, "vocab_size": len(WORDS) + 1}),
    }
    torch.manual_seed(0)
    config = transformers.LlavaConfig(**configs, image_token_index=len(WORDS), vision_feature_layer=-1)
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    model.lm_head.weight.detach()[len(WORDS)] = 0  # it writes no marks of images
    return model, processor


@pytest.fixture(scope="module")
def explainer(llava):
    return lrpfx.Explainer(llava[0], processor=llava[1], composite=CPLRP())


GIVEN = {"image": photograph(32, 32), "text": "what is <image> ?"}


def test_both_shares_are_those_of_the_inputs(llava, explainer):
    model, processor = llava
    found = explainer(GIVEN, targets=["cat", {"cat": 1.0, "dog": -1.0}])
    inputs = dict(processor(images=[GIVEN["image"]], text=[GIVEN["text"]], return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    explain_model = lrpfx.transform(model, CPLRP(), inputs, constants=["attention_mask"])
    for place, target in enumerate([{5: 1.0}, {5: 1.0, 6: -1.0}]):
        direct = lrpfx.attribute(explain_model, inputs, (-1, target), output="logits")
        pixels, tokens = direct.relevance["pixel_values"], direct.relevance["input_ids"].sum(-1)
        answer = found.answers[place]
        np.testing.assert_allclose(answer.input_relevance, [float(pixels.sum()), float(tokens.sum())], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(answer.maps["text"].sum(-1), tokens[0].numpy(), rtol=1e-6, atol=1e-9)
        ours, exact = smoothed(answer.maps["image"]), smoothed(pixels.sum((0, 1)).numpy())
        assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.98
        logits = direct.output[0, -1]
        assert answer.category.score == pytest.approx(float(sum(logits[one] * by for one, by in target.items())), rel=1e-6)
    assert set(found.shares) == {"image", "text"}
    balance = found.balance
    assert sum(found.shares.values()) + balance.constants == pytest.approx(balance.output)
    assert found["image"].relevance.shape == (32, 32)
    assert found["image"].relevance.sum() == pytest.approx(found.shares["image"])
    assert found["text"].heatmap().words[0] == "what"
    assert found.ledger.balance == pytest.approx(0, abs=1e-6)
    assert found.sheet().width > 300
    assert pickle.loads(pickle.dumps(found)).shares == found.shares


def test_an_image_and_a_text_by_any_names_and_the_likeliest_token(llava, explainer):
    model, processor = llava
    found = explainer({"question": GIVEN["text"], "picture": GIVEN["image"]})
    inputs = dict(processor(images=[GIVEN["image"]], text=[GIVEN["text"]], return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    logits = copy.deepcopy(model)(**inputs).logits[0, -1]
    assert found.target.index == int(logits.argmax())
    assert found.names == ("picture", "question")
    other = explainer({"image": photograph(64, 64).rotate(90), "text": "this is <image> a"})
    assert sum(other.shares.values()) + other.balance.constants == pytest.approx(other.balance.output)


def test_generated_tokens_come_from_regions_and_words(llava, explainer):
    model, processor = llava
    found = explainer.generation(GIVEN, 3)
    inputs = dict(processor(images=[GIVEN["image"]], text=[GIVEN["text"]], return_tensors="pt"))
    prompt, added = inputs["input_ids"], torch.from_numpy(found.tokens[-3:])
    inputs["input_ids"] = torch.cat([prompt, added[None, :-1]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["pixel_values"] = inputs["pixel_values"].double()
    explain_model = lrpfx.transform(model, CPLRP(), inputs, constants=["attention_mask"])
    is_word = inputs["input_ids"][0] != processor.image_token_id
    of_words = np.delete(found.relevance, found.place, 1)
    for number, token in enumerate(added.tolist()):
        direct = lrpfx.attribute(explain_model, inputs, (prompt.shape[1] - 1 + number, token), output="logits")
        assert token == int(direct.output[0, prompt.shape[1] - 1 + number].argmax())
        tokens = direct.relevance["input_ids"].sum(-1)[0]
        assert found.relevance[number, found.place] == pytest.approx(float(direct.relevance["pixel_values"].sum()), rel=1e-6)
        np.testing.assert_allclose(of_words[number], tokens[is_word].numpy(), rtol=1e-6, atol=1e-9)
        exact = smoothed(direct.relevance["pixel_values"].sum((0, 1)).numpy())
        assert np.corrcoef(smoothed(found.maps[number]).ravel(), exact.ravel())[0, 1] > 0.98
    np.testing.assert_allclose(found.maps.sum((1, 2)), found.relevance[:, found.place])
    for row, logit in zip(found.shares.rows, found.logits, strict=True):
        assert row[1] == pytest.approx(logit) and sum(row[2:]) == pytest.approx(logit)
    for rows, columns in ((2, 2), (3, 5)):
        regions = found.by_region(rows, columns)
        assert len(regions.columns) == rows * columns + 2
        assert [sum(row[1:]) for row in regions.rows] == pytest.approx([one.inputs for one in found.balances])
    assert found.by_region(2, 2).rows[0][2] == pytest.approx(found.maps[0, :16, 16:].sum())
    assert found.picture.words[found.place] == "image" and found.start == prompt.shape[1] - 15
    assert pickle.loads(pickle.dumps(found)) == found
    assert explainer.generation(GIVEN, continuation=found.text) == found


def test_pictures_of_generated_tokens(llava, explainer, tmp_path):
    found = explainer.generation(GIVEN, continuation="a cat", against="dog")
    assert found.against.tolist() == [6, 6] and found.shares.rows[1][0] == "cat, not dog"
    sheet = found.sheet()
    assert sheet.height > found.heatmap().to_image().height + 32
    with Image.open(found.save(tmp_path / "generation.png")) as saved:
        assert saved.size == sheet.size
    for name in ("generation.html", "generation.txt"):
        assert "image" in found.save(tmp_path / name).read_text()
    for rows, columns in ((0, 2), (2, 33)):
        with pytest.raises(InputError, match="rows"):
            found.by_region(rows, columns)
    for number in (2, -3, "a", None):
        with pytest.raises(InputError, match="a generated token has a number from -2 to 1, not"):
            found.overlay(number)
    with pytest.raises(InputTypeError, match="one image and one text"):
        explainer.generation("what is <image> ?")
    with pytest.raises(InputError, match="'<image>' stands for an image"):
        explainer.generation(GIVEN, continuation=[5, 11])
    with pytest.raises(InputError, match="the tokenizer does not know 'zzz'"):
        explainer.generation(GIVEN, continuation="a cat", against="zzz")
    with pytest.raises(InputError, match="past_key_values= is for texts"):
        explainer.generation(GIVEN, past_key_values=[])
    model, processor = llava
    silent = lrpfx.Explainer(model, processor=lambda **given: processor(**{**given, "text": ["what is a"], "images": None}))
    with pytest.raises(InputError, match="no 'pixel_values'"):
        silent.generation(GIVEN)


def paligemma():
    words = tokenizer("<image>", "<bos>")
    words.bos_token = "<bos>"
    images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, words)  # it gives the tokenizer further tokens
    vision = {**{name: OF_TEXT[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}, "patch_size": 8}
    vision |= {"num_hidden_layers": 1, "image_size": 32, "projection_dim": 32, "model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(
        vision_config={**vision, "vision_use_head": False},
        text_config={**OF_TEXT, "model_type": "gemma", "head_dim": 8, "vocab_size": len(words)},
        image_token_index=len(WORDS),
        image_token_id=len(WORDS),
        projection_dim=32,
    )
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.lm_head.weight[len(WORDS) :] = 0  # it writes no marks
    model.generation_config.eos_token_id = None
    return model, processor


def test_a_prompt_that_is_read_in_both_directions():
    """PaliGemma reads one segment, the prompt, in both directions: what it writes is another one."""
    model, processor = paligemma()
    text = "<image> what is ?"
    inputs = dict(processor(images=[GIVEN["image"]], text=[text], return_tensors="pt"))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids", "pixel_values")}
    inputs["pixel_values"] = inputs["pixel_values"].double()
    settings = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    written = model.generate(**inputs, max_new_tokens=3, **settings)
    added = written.sequences[0, -3:].tolist()
    explainer = lrpfx.Explainer(model, processor=processor, composite=CPLRP())
    found = explainer.generation({"image": GIVEN["image"], "text": text}, 3)
    assert found.tokens[-3:].tolist() == added
    expected = [float(logits[0, one]) for logits, one in zip(written.logits, added, strict=True)]
    np.testing.assert_allclose(found.logits, expected, rtol=1e-6)  # generate returns float32
    for number, row in enumerate(found.relevance):
        assert not row[found.start + number :].any() and row[found.start - 1] and row[found.place]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({**GIVEN, "image": photograph(64, 40)}, InputError, r"drops .* image\.crop"),
        ({**GIVEN, "text": "what is ?"}, InputError, "no place for the image: this processor marks it by '<image>'"),
        ({"image": GIVEN["image"]}, InputTypeError, "one image and one text"),
        ({**GIVEN, "more": "a cat"}, InputTypeError, "one image and one text"),
        ("what is <image> ?", InputTypeError, "one image and one text"),
        ({**GIVEN, "text": [{"role": "user", "content": "what"}]}, InputError, "cannot write these messages"),
    ],
)
def test_other_inputs_are_refused(llava, given, error, message):
    model, processor = llava
    with pytest.raises(error, match=message):
        lrpfx.explain(model, given, processor=processor)


def test_a_processor_stands_alone(llava):
    model, processor = llava
    with pytest.raises(InputTypeError, match="without preprocess= and tokenizer="):
        lrpfx.Explainer(model, processor=processor, tokenizer=processor.tokenizer)
    with pytest.raises(InputError, match="returned input_ids, attention_mask, and no 'pixel_values'"):
        lrpfx.explain(
            model, GIVEN, processor=lambda images, text, return_tensors: processor.tokenizer(text, return_tensors="pt")
        )


@pytest.mark.programs
def test_patches_go_back_to_pixels():
    """Qwen2-VL's processor makes rows of patches, in another order than they are seen."""
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    images = transformers.Qwen2VLImageProcessor(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096
    )
    videos = transformers.Qwen2VLVideoProcessor()
    processor = transformers.Qwen2VLProcessor(image_processor=images, tokenizer=tokenizer(*marks), video_processor=videos)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, range(len(WORDS), len(WORDS) + 4), strict=True))
    torch.manual_seed(0)
    text = {**OF_TEXT, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config={**vision, "spatial_merge_size": 2}, **ids)
    model = transformers.Qwen2VLForConditionalGeneration(config).double().eval()
    given = {"image": photograph(48, 32), "text": "what is <|vision_start|> <|image_pad|> <|vision_end|> ?"}
    explainer = lrpfx.Explainer(model, processor=processor)
    turned = explainer({**given, "image": photograph(32, 48)}, "cat")  # as many patches, and other numbers of rows and columns
    found = explainer(given, "cat")
    assert turned.balance.output != found.balance.output
    assert sum(found.shares.values()) + found.balance.constants == pytest.approx(found.balance.output)
    inputs = dict(processor(images=[given["image"]], text=[given["text"]], return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    numbers = ["attention_mask", "image_grid_thw", "mm_token_type_ids"]
    explain_model = lrpfx.transform(model, lrpfx.composites.AttnLRP(), inputs, constants=numbers)
    generated = lrpfx.explain_generation(model, given, processor=processor, max_new_tokens=2)
    first = lrpfx.attribute(explain_model, inputs, (-1, int(generated.tokens[-2])), output="logits").relevance
    assert generated.relevance[0, generated.place] == pytest.approx(float(first["pixel_values"].sum()), rel=1e-6)
    assert generated.relevance[0].sum() == pytest.approx(
        float(sum(first[name].sum() for name in ("input_ids", "pixel_values")))
    )
    rows = lrpfx.attribute(explain_model, inputs, (-1, 5), output="logits").relevance["pixel_values"].numpy()
    ordered = rows.reshape(4, 6, 2, 2, 96).transpose(0, 2, 1, 3, 4).reshape(-1, 96)  # two by two patches follow each other
    exact = smoothed(pixels_of_patches(ordered, 48, 32))
    assert np.corrcoef(smoothed(found["image"].relevance).ravel(), exact.ravel())[0, 1] > 0.98


@pytest.mark.programs
def test_tiles_and_a_number_of_images_that_depends_on_pixels(monkeypatch):
    """SmolVLM leaves out images of zeros, counts the rest, and its processor adds a small copy of the whole to the tiles."""
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # a package that only videos need
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>"]
    words = tokenizer(*marks)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    images = transformers.SmolVLMImageProcessor(**sizes)
    videos = transformers.SmolVLMVideoProcessor(size={"longest_edge": 32})
    processor = transformers.SmolVLMProcessor(images, words, videos, image_seq_len=4, chat_template="")
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**OF_TEXT, "model_type": "llama", "num_hidden_layers": 1, "vocab_size": len(words), "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.SmolVLMConfig(
        text_config=text,
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    model = transformers.SmolVLMForConditionalGeneration(config).double().eval()
    given = {"image": photograph(64, 32), "text": "what is <image> ?"}
    explainer = lrpfx.Explainer(model, processor=processor, composite=CPLRP())
    found = explainer(given, "cat")
    assert sum(found.shares.values()) + found.balance.constants == pytest.approx(found.balance.output)
    assert found["image"].relevance.sum() == pytest.approx(found.shares["image"])
    inputs = dict(processor(images=[given["image"]], text=[given["text"]], return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    assert inputs["pixel_values"].shape == (1, 3, 3, 32, 32)
    assert found.balance.output == pytest.approx(float(model(**inputs).logits[0, -1, 5]))
    direct = lrpfx.attribute(explainer.explain_model, inputs, (-1, 5), output="logits")
    pixels = direct.relevance["pixel_values"][0].sum(1).numpy()
    assert found.shares["image"] == pytest.approx(float(pixels.sum()))
    exact = np.concatenate(list(pixels[:2]), axis=1) + np.repeat(pixels[2], 2, axis=1) / 2
    assert np.corrcoef(smoothed(found["image"].relevance).ravel(), smoothed(exact).ravel())[0, 1] > 0.98
