"""Dictionaries: a sparse autoencoder or transcoder in a model, whose latents take relevance."""

import copy
import json

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision
import transformers
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus
from lrpfx.concepts.dictionary_files import read_dictionary
from lrpfx.errors import ArtefactError, InputError, InputTypeError

safetensors = pytest.importorskip("safetensors.torch")
AT, ERROR = "model.layers.1", "model.layers.1.dictionary.error.add"
FEATURES, LATENTS = 16, 40


def sparse(seed=0, features=FEATURES, latents=LATENTS):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(features, latents), nn.ReLU()).double()
    return encoder, nn.Linear(latents, features).double()


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=FEATURES,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).double().eval(), {"input_ids": torch.randint(20, (2, 6))}


def relevance_of(explain_model, x, **options):
    return lrpfx.attribute(explain_model, x, (-1, 3), **options)


def only(mapping):
    (value,) = mapping.values()
    return value


@pytest.mark.parametrize("capture", ["auto", "export"])
def test_a_dictionary_that_is_the_identity_gives_the_plain_map(language_model, capture):
    model, x = language_model
    plain = relevance_of(lrpfx.transform(model, AttnLRP(), x), x)
    spliced = lrpfx.dictionary(model, AT, nn.Identity(), nn.Identity())
    found = relevance_of(lrpfx.transform(spliced, AttnLRP(), x, capture=capture), x)
    torch.testing.assert_close(only(found.relevance), only(plain.relevance), rtol=1e-12, atol=1e-14)


def test_latents_and_the_error_share_the_relevance_of_the_value(language_model):
    model, x = language_model
    encoder, decoder = sparse()
    spliced = lrpfx.dictionary(model, AT, encoder, decoder)
    explain_model = lrpfx.transform(spliced, AttnLRP(), x)
    value_of = relevance_of(lrpfx.transform(model, AttnLRP(), x), x, record_multipliers=AT).multipliers
    found = relevance_of(explain_model, x, record=[f"{AT}.dictionary.encoder", ERROR])
    latents = next(value for name, value in found.layers.items() if "encoder" in name)

    hidden = model(**x, output_hidden_states=True).hidden_states[2]
    multiplier = only(value_of)
    active = encoder(hidden)
    expected = active * (multiplier @ decoder.weight)
    torch.testing.assert_close(latents, expected.detach(), rtol=1e-9, atol=1e-12)

    ledger = lrpfx.ledger(explain_model, x, (-1, 3))
    error = float(((hidden - decoder(active)) * multiplier).sum())
    entry = ledger.entry(ERROR)
    assert entry.constants == pytest.approx(error, rel=1e-9)
    assert abs(error) > 1e-4
    assert entry.unexplained == pytest.approx(0, abs=1e-12)
    decoded = ledger.entry(f"{AT}.dictionary.decoder")
    assert float(latents.sum()) + decoded.bias + entry.constants == pytest.approx(entry.relevance_in, rel=1e-9)


def test_relevance_reaches_the_input_through_latents_alone(language_model):
    """With latents that never fire, everything is error."""
    model, x = language_model
    encoder, decoder = sparse()
    with torch.no_grad():
        encoder[0].bias.fill_(-1e3)
    explain_model = lrpfx.transform(lrpfx.dictionary(model, AT, encoder, decoder), AttnLRP(), x)
    with pytest.warns(lrpfx.LrpfxWarning, match="the map is empty"):
        assert not only(relevance_of(explain_model, x).relevance).any()


class LayerWithTranscoder(nn.Module):
    """A layer of a Llama whose MLP was replaced by hand, with what the transcoder misses as a buffer."""

    def __init__(self, layer, parts, reads_norm):
        super().__init__()
        self.layer, self.parts, self.reads_norm = layer, nn.ModuleList(parts), reads_norm
        self.register_buffer("error", torch.zeros(2, 6, FEATURES, dtype=torch.float64))

    def decoded(self, hidden):
        read = hidden if self.reads_norm else self.layer.post_attention_layernorm(hidden)
        encoder, decoder, skip = self.parts
        return decoder(encoder(read)) + skip(read)

    def forward(self, hidden_states, **options):
        mixed, _ = self.layer.self_attn(hidden_states=self.layer.input_layernorm(hidden_states), **options)
        hidden = hidden_states + mixed
        return hidden + (self.decoded(hidden) + self.error)

    def find_error(self, hidden_states, **options):
        mixed, _ = self.layer.self_attn(hidden_states=self.layer.input_layernorm(hidden_states), **options)
        hidden = hidden_states + mixed
        self.error = self.layer.mlp(self.layer.post_attention_layernorm(hidden)) - self.decoded(hidden)


@pytest.mark.parametrize("reads_norm", [False, True])
def test_a_transcoder_stands_for_an_mlp(language_model, reads_norm):
    model, x = language_model
    encoder, decoder = sparse()
    skip = nn.Linear(FEATURES, FEATURES, bias=False).double()
    reads = f"{AT}.post_attention_layernorm" if reads_norm else f"{AT}.mlp"
    spliced = lrpfx.dictionary(model, f"{AT}.mlp", encoder, decoder, skip=skip, reads=reads)
    torch.testing.assert_close(spliced(**x).logits, model(**x).logits, rtol=1e-12, atol=1e-14)

    by_hand = copy.deepcopy(model)
    layer = by_hand.model.layers[1] = LayerWithTranscoder(by_hand.model.layers[1], (encoder, decoder, skip), reads_norm).eval()
    with torch.no_grad():
        remove = layer.register_forward_pre_hook(
            lambda module, args, options: module.find_error(*args, **options), with_kwargs=True
        )
        by_hand(**x)
        remove.remove()
    torch.testing.assert_close(by_hand(**x).logits, model(**x).logits, rtol=1e-12, atol=1e-14)
    expected = only(relevance_of(lrpfx.transform(by_hand, AttnLRP(), x), x).relevance)
    found = only(relevance_of(lrpfx.transform(spliced, AttnLRP(), x), x).relevance)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_images_and_two_dictionaries():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(4, 6).double()
    spliced = model
    for place in ("1", "3"):
        spliced = lrpfx.dictionary(spliced, place, *sparse(1, 8, 12))
    explain_model = lrpfx.transform(spliced, EpsilonPlus(), x)
    torch.testing.assert_close(explain_model(x), model(x))
    found = lrpfx.attribute(explain_model, x, 1, record=["1.dictionary.encoder", "3.dictionary.encoder"])
    assert [tuple(value.shape) for value in found.layers.values()] == [(4, 12), (4, 12)]
    assert set(model.state_dict()) < set(spliced.state_dict())
    assert not hasattr(model[1], "dictionary")


def test_differences_from_a_reference_add_up():
    """An error that differs between an input and its reference is in an account of its own, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double().eval()
    x, reference = torch.randn(2, 4, 6).double()
    explain_model = lrpfx.transform(lrpfx.dictionary(model, "1", *sparse(1, 8, 12)), DeepLIFT(), x)
    ledger = lrpfx.ledger(explain_model, x, 1, reference=reference)
    assert ledger.balance == pytest.approx(0, abs=1e-12)
    assert abs(ledger.entry("1.dictionary.error.add").constants) > 1e-3


def test_a_program_in_half_precision_with_a_dictionary_in_float32(language_model):
    model, x = language_model
    encoder, decoder = sparse()
    spliced = lrpfx.dictionary(copy.deepcopy(model).bfloat16(), AT, encoder.float(), decoder.float())
    assert spliced(**x).logits.dtype == torch.bfloat16
    explain_model = lrpfx.transform(spliced, AttnLRP(), x)
    found = relevance_of(explain_model, x, record=f"{AT}.dictionary.encoder")
    assert only(found.layers).isfinite().all()
    assert only(found.layers).dtype == torch.float32


def test_a_lowered_program_has_the_same_relevance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).float().eval()
    x = torch.randn(4, 6).float()
    explain_model = lrpfx.transform(lrpfx.dictionary(model, "1", *(one.float() for one in sparse(1, 8, 12))), EpsilonPlus(), x)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    found = lrpfx.lower(explain_model, x).module()(x, torch.tensor([1, 1, 1, 1]))
    torch.testing.assert_close(found["relevance"], expected)


# --- files -----------------------------------------------------------------------------------------------------------------


def tensors_of_sae(**more):
    torch.manual_seed(0)
    made = {
        "W_enc": torch.randn(FEATURES, LATENTS),
        "W_dec": torch.randn(LATENTS, FEATURES),
        "b_enc": torch.randn(LATENTS),
        "b_dec": torch.randn(FEATURES),
    }
    return {name: one.float() if one.is_floating_point() else one for name, one in {**made, **more}.items()}


def written(folder, tensors, **settings):
    safetensors.save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"d_in": FEATURES, "d_sae": LATENTS, **settings}))
    return folder


def check(parts, tensors, latents, x, skip=0):
    """`latents`: by the formula of the paper."""
    torch.testing.assert_close(parts.encoder(x), latents, rtol=1e-4, atol=1e-4)
    decoded = parts.decoder(parts.encoder(x)) + (parts.skip(x) if parts.skip is not None else 0)
    torch.testing.assert_close(decoded, latents @ tensors["W_dec"] + tensors["b_dec"] + skip, rtol=1e-4, atol=1e-4)


X = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(3), dtype=torch.float32)


@pytest.mark.parametrize("centred", [True, False])
def test_standard_and_jumping_autoencoders_of_sae_lens(tmp_path, centred):
    tensors = tensors_of_sae()
    before = (X - tensors["b_dec"] * centred) @ tensors["W_enc"] + tensors["b_enc"]
    parts = read_dictionary(written(tmp_path, tensors, architecture="standard", apply_b_dec_to_input=centred))
    check(parts, tensors, functional.relu(before), X)
    tensors["threshold"] = torch.rand(LATENTS).float() * 3
    parts = read_dictionary(written(tmp_path, tensors, architecture="jumprelu", apply_b_dec_to_input=centred))
    check(parts, tensors, functional.relu(before) * (before > tensors["threshold"]), X)


@pytest.mark.parametrize("rescaled", [True, False])
def test_the_largest_latents_of_sae_lens(tmp_path, rescaled):
    tensors = tensors_of_sae()
    settings = {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": rescaled, "apply_b_dec_to_input": True}
    parts = read_dictionary(written(tmp_path, tensors, **settings))
    sizes = tensors["W_dec"].norm(dim=-1) if rescaled else torch.ones(LATENTS).float()
    before = ((X - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]) * sizes
    values, indices = torch.topk(before, 5)
    latents = torch.zeros_like(before).scatter(-1, indices, functional.relu(values))
    torch.testing.assert_close(parts.encoder(X), latents, rtol=1e-4, atol=1e-4)
    decoded = (latents / sizes) @ tensors["W_dec"] + tensors["b_dec"]
    torch.testing.assert_close(parts.decoder(parts.encoder(X)), decoded, rtol=1e-4, atol=1e-4)


def test_gated_autoencoders_of_sae_lens(tmp_path):
    tensors = tensors_of_sae(b_gate=torch.randn(LATENTS), b_mag=torch.randn(LATENTS), r_mag=torch.randn(LATENTS) * 0.3)
    del tensors["b_enc"]
    parts = read_dictionary(written(tmp_path, tensors, architecture="gated", apply_b_dec_to_input=True))
    centred = X - tensors["b_dec"]
    gate = centred @ tensors["W_enc"] + tensors["b_gate"] > 0
    magnitude = functional.relu(centred @ (tensors["W_enc"] * tensors["r_mag"].exp()) + tensors["b_mag"])
    check(parts, tensors, magnitude * gate, X)


def test_transcoders_of_sae_lens(tmp_path):
    tensors = tensors_of_sae(W_dec=torch.randn(LATENTS, 7), b_dec=torch.randn(7), W_skip=torch.randn(7, FEATURES))
    before = X @ tensors["W_enc"] + tensors["b_enc"]
    parts = read_dictionary(written(tmp_path, tensors, architecture="skip_transcoder"))
    check(parts, tensors, functional.relu(before), X, X @ tensors["W_skip"].T)


@pytest.mark.parametrize("kind", ["relu", "jumprelu", "topk"])
def test_transcoders_of_circuit_tracer(tmp_path, kind):
    tensors = tensors_of_sae()
    before = X @ tensors["W_enc"] + tensors["b_enc"]
    stored = {**tensors, "W_enc": tensors["W_enc"].T.contiguous(), "W_skip": torch.randn(FEATURES, FEATURES).float()}
    latents = functional.relu(before)
    if kind == "jumprelu":
        stored["activation_function.threshold"] = torch.rand(LATENTS).float()
        latents = before * (before > stored["activation_function.threshold"])
    elif kind == "topk":
        stored["k"] = torch.tensor(4)
        values, indices = torch.topk(before, 4)
        latents = torch.zeros_like(before).scatter(-1, indices, values)
    path = tmp_path / "layer_1.safetensors"
    safetensors.save_file(stored, path)
    check(read_dictionary(path), tensors, latents, X, X @ stored["W_skip"].T)


def test_weights_are_given_by_path(language_model, tmp_path):
    model, x = language_model
    written(tmp_path, {name: value * 0.3 for name, value in tensors_of_sae().items()}, architecture="standard")
    spliced = lrpfx.dictionary(copy.deepcopy(model).float(), AT, weights=tmp_path)
    explain_model = lrpfx.transform(spliced, AttnLRP(), x)
    found = relevance_of(explain_model, x, record=f"{AT}.dictionary.encoder")
    assert only(found.layers).shape == (2, 6, LATENTS)


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        ("model.layers.1", {"hook_name": "blocks.1.hook_resid_post"}),
        ("model.layers.1", {"metadata": {"hook_name": "blocks.2.hook_resid_pre"}}),
        ("model.layers.2.mlp", {"hook_name": "blocks.2.ln2.hook_normalized", "hook_name_out": "blocks.2.hook_mlp_out"}),
        ("model.embed_tokens", {"hook_point": "blocks.0.hook_resid_pre"}),
    ],
)
def test_the_layer_that_a_file_names_is_the_place_of_its_dictionary(language_model, tmp_path, place, settings):
    written(tmp_path, tensors_of_sae(), **settings)
    lrpfx.dictionary(language_model[0], place, weights=tmp_path)
    with pytest.raises(InputError, match=r"trained for blocks\.\d\.\w+, which comes from") as raised:
        lrpfx.dictionary(language_model[0], "model.layers.0", weights=tmp_path)
    assert raised.value.topic == "dictionaries"
    written(tmp_path, tensors_of_sae(), hook_name="a place of one's own")
    lrpfx.dictionary(language_model[0], "model.layers.0", weights=tmp_path)


@pytest.mark.parametrize(
    ("hook", "place", "message"),
    [
        ("hook_mlp_out", "model.layers.1", r"whole layer: name the part, such as 'model\.layers\.1\.mlp'"),
        ("hook_attn_out", "model.layers.1", r"such as 'model\.layers\.1\.self_attn'"),
        ("hook_resid_post", "model.layers.1.mlp", r"'model\.layers\.1\.mlp' is a part of one"),
        ("hook_resid_pre", "model.layers.0.self_attn", "a part of one"),
    ],
)
def test_a_part_of_a_layer_is_not_the_layer(language_model, tmp_path, hook, place, message):
    written(tmp_path, tensors_of_sae(), hook_name=f"blocks.1.{hook}")
    with pytest.raises(InputError, match=message):
        lrpfx.dictionary(language_model[0], place, weights=tmp_path)


# --- errors ----------------------------------------------------------------------------------------------------------------


def test_a_dictionary_of_another_width_is_an_error_that_names_it(language_model):
    model, x = language_model
    for encoder, decoder in (sparse(features=9), (sparse()[0], sparse(features=9)[1]), (sparse()[0], sparse(features=1)[1])):
        spliced = lrpfx.dictionary(model, AT, encoder, decoder)
        with pytest.raises(InputError, match=r"dictionary at 'model.layers.1'"):
            spliced(**x)
        with pytest.raises(lrpfx.LrpfxError, match=r"dictionary at 'model.layers.1'"):
            lrpfx.transform(spliced, AttnLRP(), x)


def test_arguments_that_make_no_dictionary(language_model, tmp_path):
    model, x = language_model
    encoder, decoder = sparse()
    explain_model = lrpfx.transform(model, AttnLRP(), x)
    for error, match, arguments in (
        (InputTypeError, "transform what it returns", (explain_model, AT, encoder, decoder)),
        (InputTypeError, "module, not a str", (model, AT, "encoder", decoder)),
        (InputTypeError, "path of a module", (model, 5, encoder, decoder)),
        (InputError, r"no module 'model.layer.1'\. Did you mean 'model.layers.1'", (model, "model.layer.1", encoder, decoder)),
        (InputError, "needs decoder", (model, AT, encoder)),
        (InputError, "40 latents, and the decoder takes 39", (model, AT, nn.Linear(FEATURES, 40), nn.Linear(39, FEATURES))),
        (InputError, "already", (lrpfx.dictionary(model, AT, encoder, decoder), AT, encoder, decoder)),
    ):
        with pytest.raises(error, match=match):
            lrpfx.dictionary(*arguments)
    with pytest.raises(InputError, match="either modules"):
        lrpfx.dictionary(model, AT, encoder, decoder, weights=tmp_path)
    with pytest.raises(InputError, match="returns a BaseModelOutput"):
        lrpfx.dictionary(model, "model", encoder, decoder)(**x)
    with pytest.raises(InputError, match=r"runs all its children: name the last one, '0\.1'"):
        lrpfx.dictionary(nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), "0", encoder, decoder)
    with pytest.raises(InputError, match="runs after it"):
        lrpfx.dictionary(model, AT, encoder, decoder, reads="lm_head")(**x)


def gated_tensors(**more):
    tensors = tensors_of_sae(**dict.fromkeys(("r_mag", "b_mag", "b_gate"), torch.zeros(LATENTS)) | more)
    del tensors["b_enc"]
    return tensors


@pytest.mark.parametrize(
    "count", [torch.tensor(2.5), torch.tensor(True), torch.tensor(1j), torch.tensor([1, 2]), torch.tensor(0)]
)
def test_a_count_of_latents_is_a_whole_number(tmp_path, count):
    path = tmp_path / "layer_0.safetensors"
    safetensors.save_file({**tensors_of_tracer(), "k": count}, path)
    with pytest.raises(ArtefactError, match="and k is"):
        read_dictionary(path)


def tensors_of_tracer():
    tensors = tensors_of_sae()
    return {**tensors, "W_enc": tensors["W_enc"].T.contiguous()}


def test_weights_of_several_precisions_lose_no_digits(tmp_path):
    tensors, path = tensors_of_tracer(), tmp_path / "layer_0.safetensors"
    safetensors.save_file({**tensors, "W_enc": tensors["W_enc"].bfloat16(), "k": torch.tensor(3.0)}, path)
    parts = read_dictionary(path)
    before = X @ tensors["W_enc"].bfloat16().float().T + tensors["b_enc"]
    best = before.topk(3).indices
    check(parts, tensors, torch.zeros_like(before).scatter(1, best, before.gather(1, best)), X)


def test_a_latent_that_is_decoded_to_nothing_stays_so(tmp_path):
    tensors = tensors_of_sae()
    tensors["W_dec"][0] = 0
    parts = read_dictionary(written(tmp_path, tensors, architecture="topk", k=5, rescale_acts_by_decoder_norm=True))
    found = parts.decoder(parts.encoder(X))
    assert bool(torch.isfinite(found).all()) and bool((parts.decoder.weight[:, 0] == 0).all())


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu(), 0


def test_modules_that_do_not_fit_the_values_are_errors_and_never_silent(language_model):
    """Beside values of 1e20, those of the model would be lost in the sum, and the forward would be another."""
    model, x = language_model
    encoder, decoder = sparse()
    huge, nothing = (nn.Linear(LATENTS, FEATURES).double().requires_grad_(False) for _ in range(2))
    huge.weight.fill_(1e20)
    nothing.weight.fill_(torch.nan)
    for parts, match in (((encoder, huge), "are lost beside"), ((encoder, nothing), "not finite"),
                         ((Two(FEATURES, LATENTS).double(), decoder), "returns a tuple, not a tensor")):  # fmt: skip
        spliced = lrpfx.dictionary(model, AT, *parts)
        with pytest.raises(InputError, match=match):
            spliced(**x)
        with pytest.raises(InputError, match=match):
            lrpfx.transform(spliced, AttnLRP(), x)
    spliced = lrpfx.dictionary(model, AT, encoder, decoder)
    alone = torch.vmap(lambda ids: torch.func.functional_call(spliced, {}, (ids[None],)).logits[0])
    torch.testing.assert_close(alone(x["input_ids"]), model(**x).logits)


@pytest.mark.parametrize("at", ["encoder.block.1", "decoder.block.0.layer.1", "layers.0", "bert.encoder.layer.1.output"])
def test_blocks_of_other_families(at):
    """T5, ViT and BERT: the model's forward, and the balance of the ledger."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    ids, target = torch.randint(20, (1, 5)), 1
    if at.startswith("layers"):
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
        model, x = transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 16, 16).double()}
        at = next(name for name, _ in model.named_modules() if name.endswith(("layers.0", "layer.0")))
    elif at.startswith("bert"):
        model, x = (
            transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes)),
            {"input_ids": ids},
        )
    else:
        config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
        model, x, target = (
            transformers.T5ForConditionalGeneration(config),
            {"input_ids": ids, "decoder_input_ids": ids},
            (-1, 3),
        )
    model.double().eval()
    spliced = lrpfx.dictionary(model, at, *sparse())
    torch.testing.assert_close(spliced(**x).logits, model(**x).logits)
    explain_model = lrpfx.transform(spliced, AttnLRP(), x)
    found = lrpfx.attribute(explain_model, x, target, output="logits", record=f"{at}.dictionary.encoder")
    assert found.layers[f"{at}.dictionary.encoder"].shape[-1] == LATENTS
    assert lrpfx.ledger(explain_model, x, target, output="logits").unexplained < 1e-9


def test_files_that_are_no_dictionary(tmp_path):
    tensors = tensors_of_sae()
    for error, match, changed, settings in (
        (InputError, "architecture 'temporal'", tensors, {"architecture": "temporal"}),
        (InputError, "normalize_activations", tensors, {"normalize_activations": "layer_norm"}),
        (InputError, "reshape_activations", tensors, {"reshape_activations": "hook_z"}),
        (InputError, "activation 'tanh-relu'", tensors, {"activation_fn_str": "tanh-relu"}),
        (InputError, "finetuning_scaling_factor", tensors, {"finetuning_scaling_factor": True}),
        (InputError, "does not know: lora", {**tensors, "lora": torch.ones(3)}, {}),
        (ArtefactError, "has no b_dec", {name: one for name, one in tensors.items() if name != "b_dec"}, {}),
        (ArtefactError, "b_enc has the shape", {**tensors, "b_enc": torch.ones(3)}, {}),
        (ArtefactError, "not finite", {**tensors, "b_enc": tensors["b_enc"] * torch.inf}, {}),
        (ArtefactError, "k is 50", tensors, {"architecture": "topk", "k": 50}),
        (ArtefactError, "k is None", tensors, {"architecture": "topk"}),
        (ArtefactError, r"W_enc is of torch\.int8", {**tensors, "W_enc": tensors["W_enc"].to(torch.int8)}, {}),
        (ArtefactError, "b_enc is of torch.float8", {**tensors, "b_enc": tensors["b_enc"].to(torch.float8_e4m3fn)}, {}),
        (ArtefactError, "d_in=9, and the weights 16", tensors, {"d_in": 9}),
        (ArtefactError, "d_sae='40', and the weights 40", tensors, {"d_sae": "40"}),
        (ArtefactError, "is true or false, not 'no'", tensors, {"apply_b_dec_to_input": "no"}),
        (ArtefactError, "is true or false, not 1", tensors, {"rescale_acts_by_decoder_norm": 1}),
        (ArtefactError, "exponentials of r_mag", gated_tensors(r_mag=torch.full((LATENTS,), 100.0)), {"architecture": "gated"}),
    ):
        with pytest.raises(error, match=match):
            read_dictionary(written(tmp_path, changed, **settings))
    (tmp_path / "cfg.json").write_text("[")
    with pytest.raises(ArtefactError, match="not JSON"):
        read_dictionary(tmp_path)
    (tmp_path / "cfg.json").write_text("[]")
    with pytest.raises(ArtefactError, match="holds a list"):
        read_dictionary(tmp_path)
    damaged = tmp_path / "layer_0.safetensors"
    damaged.write_bytes(b"\xff" * 40)
    with pytest.raises(ArtefactError, match="damaged"):
        read_dictionary(damaged)
    for path, match in (("no.safetensors", "no file"), ("weights.pt", "neither"), ("no", "neither")):
        with pytest.raises(InputError, match=match):
            read_dictionary(tmp_path / path)


class Named(nn.Linear):
    """A layer with an attribute of the name that dictionaries take."""

    dictionary = ("a", 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(Named(4, 4)), "attribute of this name"),
        (nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4)})), "not called"),
        (nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])), "not called"),
    ],
)
def test_modules_that_cannot_have_a_dictionary(model, message):
    with pytest.raises(InputError, match=message):
        lrpfx.dictionary(model, "0", nn.Linear(4, 9), nn.Linear(9, 4))


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if len(x) == 3:
            raise ValueError("three")
        return self.last(x)


def test_a_call_that_fails_leaves_nothing_that_cannot_be_copied():
    torch.manual_seed(0)
    model = Fails().double().eval()
    late = lrpfx.dictionary(model, "last", *sparse(features=4), reads="first")
    x = torch.randn(2, 4).double()
    with pytest.raises(ValueError, match="three"):
        late(torch.randn(3, 4).double().requires_grad_() * 1)
    torch.testing.assert_close(copy.deepcopy(late)(x), model(x))
    torch.testing.assert_close(lrpfx.transform(late, EpsilonPlus(), x)(x), model(x))


def test_casts_of_the_copy_leave_the_model_alone(language_model):
    """The parameters share memory until one of both is cast or moved."""
    model, _ = language_model
    encoder, decoder = sparse()
    spliced = lrpfx.dictionary(model, AT, encoder, decoder)
    weight = model.lm_head.weight
    assert spliced.lm_head.weight.data_ptr() == weight.data_ptr()
    spliced.float()
    assert weight.dtype == encoder[0].weight.dtype == torch.float64
    assert spliced.lm_head.weight.dtype == torch.float32
