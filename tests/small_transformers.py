"""Architectures of Hugging Face transformers in small random configurations, with inputs for them."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision

# isort: split
import transformers

#: Sizes for every option of a configuration that has one of these names.
SIZES = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8, "type_vocab_size": 2},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_num_experts": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"image_size": 32, "patch_size": 8, "num_labels": 3},
}


@dataclass(frozen=True)
class Architecture:
    """A model class with the options of its configuration, and what makes its inputs."""

    modality: str
    model: str  # the class
    options: dict[str, Any] = field(default_factory=dict)  # beyond `SIZES`
    inputs: str = "text"
    said: dict[str, Any] = field(default_factory=dict)  # arguments of forward that lrpfx needs, beyond the model's own inputs
    constants: tuple[str, ...] = ()  # inputs that forward reads as numbers
    lengths: tuple[int, int] = (7, 5)  # of the inputs
    dtype: torch.dtype = torch.float64
    called_before: bool = False  # forward changes the model at its first call
    seed: int = 0

    @property
    def name(self) -> str:
        return self.model


def _table(modality, inputs, models, lengths=(7, 5), dtype=torch.float64):
    return [Architecture(modality, name, options, inputs, lengths=lengths, dtype=dtype) for name, options in models.items()]


_SMALL_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}
_SMALL_TEXT = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    **{"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_SPEECH = {
    **{"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_conv_pos_embeddings": 8},
    **{"num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "num_feat_extract_layers": 2},
}
_PYRAMID = {
    **{"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4], "patch_size": 4},
}

TEXT_ENCODERS = {
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": {},
    "CamembertForSequenceClassification": {},
    "XLMRobertaForSequenceClassification": {},
    "DistilBertForSequenceClassification": {"dim": 32, "hidden_dim": 48},
    "AlbertForSequenceClassification": {"embedding_size": 16},
    "ElectraForSequenceClassification": {"embedding_size": 16},
    "DebertaForSequenceClassification": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2ForSequenceClassification": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "ModernBertForSequenceClassification": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    "MPNetForSequenceClassification": {},
    "BigBirdForSequenceClassification": {"block_size": 2},
    "FunnelForSequenceClassification": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    "MobileBertForSequenceClassification": {
        "embedding_size": 16,
        "intra_bottleneck_size": 32,
        "use_bottleneck_attention": True,
    },
    "SqueezeBertForSequenceClassification": {"embedding_size": 32},
    "ConvBertForSequenceClassification": {"embedding_size": 16},
    "RemBertForSequenceClassification": {"input_embedding_size": 16},
    "RoFormerForSequenceClassification": {"embedding_size": 16},
    "MegatronBertForSequenceClassification": {},
    "EsmForSequenceClassification": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "XLMForSequenceClassification": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "IBertForSequenceClassification": {},
    "BertForMaskedLM": {},
}
DECODERS = {
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GPTNeoXForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "GPTBigCodeForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 4},
    "Gemma3ForCausalLM": {"sliding_window": 4},
    "Gemma4ForCausalLM": {
        **{"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
        **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    },
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "FalconForCausalLM": {},
    "StableLmForCausalLM": {},
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "CohereForCausalLM": {},
    "GraniteForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "PersimmonForCausalLM": {},
    "MptForCausalLM": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "HeliumForCausalLM": {},
    "GlmForCausalLM": {},
    "NemotronForCausalLM": {},
    "ModernBertDecoderForCausalLM": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
}
ENCODER_DECODERS = {
    "T5ForConditionalGeneration": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0},
    "UMT5ForConditionalGeneration": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0},
    "LongT5ForConditionalGeneration": {
        **{"d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0, "local_radius": 2, "d_model": 32},
    },
    "BartForConditionalGeneration": {"decoder_start_token_id": 2},
    "MBartForConditionalGeneration": {"decoder_start_token_id": 2},
    "PegasusForConditionalGeneration": {"decoder_start_token_id": 0},
    "MarianMTModel": {"decoder_start_token_id": 0, "decoder_vocab_size": 60},
    "BlenderbotForConditionalGeneration": {"decoder_start_token_id": 1},
    "M2M100ForConditionalGeneration": {"decoder_start_token_id": 2},
}
MIXTURES = {
    "MixtralForCausalLM": {},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 24},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "OlmoeForCausalLM": {},
    "DeepseekV2ForCausalLM": {
        **{"n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
    "DeepseekV3ForCausalLM": {
        **{"n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
        **{"v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
    "GptOssForCausalLM": {"sliding_window": 4},
    "MiniMaxForCausalLM": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4, "head_dim": 8},
    "PhimoeForCausalLM": {},
}
STATE_SPACES = {
    "MambaForCausalLM": {"state_size": 4},
    "FalconMambaForCausalLM": {"state_size": 4},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "RecurrentGemmaForCausalLM": {"lru_width": 32, "attention_window_size": 4, "num_hidden_layers": 3},
    "BambaForCausalLM": {
        **{"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4},
        **{"attn_layer_indices": [1]},
    },
}
_MEMORIES = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
DELTA_RULES = {
    "Qwen3NextForCausalLM": _MEMORIES | {"num_experts": 0, "mlp_only_layers": [0, 1]},
    "Qwen3_5ForCausalLM": _MEMORIES,
    "OlmoHybridForCausalLM": _MEMORIES,
}
_FOUR_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
VISION = {
    "ViTForImageClassification": {},
    "DeiTForImageClassification": {},
    "BeitForImageClassification": {},
    "Data2VecVisionForImageClassification": {},
    "SwinForImageClassification": {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "Swinv2ForImageClassification": {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "ConvNextForImageClassification": {**_FOUR_STAGES, "num_stages": 4, "patch_size": 4},
    "ConvNextV2ForImageClassification": {**_FOUR_STAGES, "num_stages": 4, "patch_size": 4},
    "Dinov2ForImageClassification": {},
    "Dinov2WithRegistersForImageClassification": {},
    "PvtForImageClassification": {**_PYRAMID, "sequence_reduction_ratios": [4, 2, 1, 1], "patch_sizes": [4, 2, 2, 2]},
    "PvtV2ForImageClassification": {**_FOUR_STAGES, "num_attention_heads": [1, 2, 2, 4]},
    "SegformerForImageClassification": {**_PYRAMID},
    "MobileViTForImageClassification": {
        **{"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    },
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
    "RegNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4},
    "BitForImageClassification": {"embedding_size": 8, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 4},
    "PoolFormerForImageClassification": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
    "FocalNetForImageClassification": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2],
                                       "focal_windows": [3, 3], "patch_size": 4},
    "CvtForImageClassification": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "EfficientNetForImageClassification": {
        **{"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    },
    "HieraForImageClassification": {
        **{"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": [7, 7], "masked_unit_size": [4, 4]},
        **{"query_stride": [2, 2], "num_query_pool": 1, "image_size": [32, 32]},
    },
    "ViTMSNForImageClassification": {},
    "YolosForObjectDetection": {"image_size": [32, 32], "num_detection_tokens": 4},
}  # fmt: skip
SPEECH = {
    "Wav2Vec2ForSequenceClassification": _SPEECH,
    "Wav2Vec2ForCTC": _SPEECH,
    "HubertForSequenceClassification": _SPEECH,
    "WavLMForSequenceClassification": {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 16},
    "UniSpeechForSequenceClassification": _SPEECH,
    "Data2VecAudioForSequenceClassification": {**_SPEECH, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "SEWForSequenceClassification": {**_SPEECH, "squeeze_factor": 2},
    "Wav2Vec2ConformerForSequenceClassification": {**_SPEECH, "position_embeddings_type": "relative"},
}
_VISION_OF_TWO = {"patch_size": 8, **_SMALL_VISION}

ARCHITECTURES = [
    Architecture(  # its length is a multiple of the number of landmarks
        "text encoder",
        "NystromformerForSequenceClassification",
        {"num_landmarks": 8, "segment_means_seq_len": 8, "max_position_embeddings": 64},
        lengths=(8, 8),
    ),
    *_table("text encoder", "text", TEXT_ENCODERS),
    Architecture(
        "text encoder", "LongformerForSequenceClassification", {"attention_window": 4}, constants=("attention_mask",)
    ),
    Architecture("text encoder", "FNetForSequenceClassification", inputs="ids"),
    Architecture(
        "text encoder", "XLNetForSequenceClassification", {"d_inner": 48, "n_layer": 2, "n_head": 4, "d_head": 8},
        said={"use_mems": False},
    ),
    *_table("text decoder", "text", DECODERS),
    *_table("encoder-decoder", "text to text", ENCODER_DECODERS),
    Architecture(  # the gradients of hidden positions are not finite in float64
        "encoder-decoder",
        "LEDForConditionalGeneration",
        {"attention_window": 4, "max_encoder_position_embeddings": 64},
        "text to text",
        constants=("attention_mask",),
        dtype=torch.float32,
    ),
    Architecture(  # its mask is a sum of two infinities in float64
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        {
            **{"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "ngram": 2},
            **{"num_decoder_attention_heads": 4},
        },
        "text to text",
        dtype=torch.float32,
    ),
    # Torch's grouped product takes no float64.
    *_table("mixture of experts", "text", MIXTURES, dtype=torch.float32),
    Architecture("mixture of experts", "GraniteMoeForCausalLM", dtype=torch.float32),
    Architecture(
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        {
            **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2},
            "decoder_start_token_id": 0,
        },
        "text to text",
    ),
    *_table("state space", "text", STATE_SPACES),
    Architecture(
        "state space",
        "xLSTMForCausalLM",
        {"hidden_size": 128, "num_heads": 4, "chunk_size": 4, "autocast_kernel_dtype": "float32"},
        dtype=torch.float32,
    ),
    Architecture(
        "state space", "RwkvForCausalLM", {"attention_hidden_size": 32}, called_before=True
    ),
    Architecture(
        "state space",
        "JambaForCausalLM",
        {
            **{"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "use_mamba_kernels": False},
        },
        dtype=torch.float32,
    ),
    *_table("delta rule", "text", DELTA_RULES),
    Architecture(
        "delta rule",
        "KimiLinearForCausalLM",
        {
            **{"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4},
            **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4},
            **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_key_value_heads": 4},
            "mlp_layer_types": ["dense", "sparse"],
        },
        dtype=torch.float32,
    ),
    *_table("vision", "image", VISION),
    Architecture(
        "vision",
        "LevitForImageClassification",
        {
            **{"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2]},
            **{"depths": [1, 1, 1], "key_dim": [4, 4, 4]},
        },
        "image",
        seed=1,
    ),
    Architecture(
        "vision",
        "DPTForDepthEstimation",
        {
            **{"backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "neck_hidden_sizes": [4, 8, 8, 8]},
            **{"fusion_hidden_size": 8, "use_auxiliary_head": False},
        },
        "image",
        seed=1,
    ),
    *_table("audio", "waveform", SPEECH, lengths=(400, 320)),
    Architecture("audio", "ASTForAudioClassification", {"num_mel_bins": 16, "max_length": 24, "patch_size": 8}, "spectrogram"),
    Architecture(
        "audio",
        "WhisperForConditionalGeneration",
        {
            **{"d_model": 32, "num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 16},
            **{"decoder_start_token_id": 1},
        },
        "speech to text",
    ),
    Architecture(
        "audio",
        "Speech2TextForConditionalGeneration",
        {
            **{"d_model": 32, "max_source_positions": 24, "max_target_positions": 16, "decoder_start_token_id": 1},
            **{"input_feat_per_channel": 16, "conv_channels": 16},
        },
        "features to text",
        lengths=(24, 16),
    ),
    Architecture(
        "two modalities", "CLIPModel", {"text_config": _SMALL_TEXT, "vision_config": _VISION_OF_TWO, "projection_dim": 16},
        "image and text",
    ),
    Architecture(
        "two modalities", "SiglipModel", {"text_config": _SMALL_TEXT, "vision_config": _VISION_OF_TWO}, "image and text"
    ),
    Architecture(
        "two modalities", "AltCLIPModel",
        {"text_config": {**_SMALL_TEXT, "project_dim": 16}, "vision_config": _VISION_OF_TWO, "projection_dim": 16},
        "image and text",
    ),
    Architecture(
        "two modalities", "ChineseCLIPModel",
        {"text_config": _SMALL_TEXT, "vision_config": _VISION_OF_TWO, "projection_dim": 16}, "image and text",
    ),
    Architecture(
        "two modalities", "BlipForImageTextRetrieval",
        {
            "text_config": {**_SMALL_TEXT, "encoder_hidden_size": 32}, "vision_config": _VISION_OF_TWO, "projection_dim": 16,
            "image_text_hidden_size": 16,
        },
        "image and text",
    ),
    Architecture("two modalities", "ViltForImagesAndTextClassification", {"num_images": 1, "patch_size": 8}, "images and text"),
    Architecture("two modalities", "VisualBertModel", {"visual_embedding_dim": 16}, "text and features"),
    Architecture(
        "two modalities", "LlavaForConditionalGeneration",
        {
            "text_config": {**_SMALL_TEXT, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {**_VISION_OF_TWO, "model_type": "clip_vision_model"}, "image_token_index": 5,
        },
        "text with an image", lengths=(24, 21),
    ),
    Architecture(
        "two modalities", "SmolVLMForConditionalGeneration",
        {
            "text_config": {**_SMALL_TEXT, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": _VISION_OF_TWO, "image_token_id": 5, "scale_factor": 2,
        },
        "text with tiles", constants=("attention_mask",), lengths=(12, 9),
    ),
    Architecture("two modalities", "LayoutLMForSequenceClassification", {"max_2d_position_embeddings": 64}, "text and boxes"),
]  # fmt: skip


def architecture(name: str) -> Architecture:
    return next(one for one in ARCHITECTURES if one.name == name)


def small_model(one: Architecture, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The model with random weights, biases and statistics, in evaluation mode."""
    torch.manual_seed(one.seed)
    model_class = getattr(transformers, one.model)
    config_class = model_class.config_class
    known = {*config_class.__annotations__, *config_class.attribute_map, "num_labels"}
    for base in config_class.__mro__[1:]:
        known |= set(getattr(base, "__annotations__", ()))
    options = {name: value for name, value in SIZES.items() if name in known} | one.options
    for alias, name in config_class.attribute_map.items():  # the option may be given by either name
        if alias in options and name in one.options and alias not in one.options:
            del options[alias]
    model = model_class(config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
            elif name.endswith("running_mean"):
                buffer.normal_()
    return model.to(dtype or one.dtype)


def inputs_for(one: Architecture, model: torch.nn.Module, length: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Two samples of a length, with a mask that hides the end of the second where the architecture takes one."""
    torch.manual_seed(length)
    dtype = dtype or one.dtype
    config = model.config
    image = torch.rand(2, 3, *2 * [_image_size(config)], dtype=dtype) * 2 - 1
    ids = torch.randint(6, 60, (2, length))
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, -2:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    later = {"decoder_input_ids": torch.randint(6, 60, (2, 4))}
    if one.inputs == "ids":
        return {"input_ids": ids}
    if one.inputs == "text":
        classifies = "SequenceClassification" in one.model
        return {"input_ids": torch.where(mask.bool(), ids, 0) if classifies else ids, "attention_mask": mask}
    if one.inputs == "text to text":
        return {**text, **later}
    if one.inputs == "image":
        return {"pixel_values": image}
    if one.inputs == "waveform":
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, -80:] = 0
        return {"input_values": torch.randn(2, length, dtype=dtype), "attention_mask": mask}
    if one.inputs == "spectrogram":
        return {"input_values": torch.randn(2, 24, 16, dtype=dtype)}
    if one.inputs == "speech to text":
        return {"input_features": torch.randn(2, 16, 24, dtype=dtype), **later}
    if one.inputs == "features to text":
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, -4:] = 0
        return {"input_features": torch.randn(2, length, 16, dtype=dtype), "attention_mask": mask, **later}
    if one.inputs == "image and text":
        return {**text, "pixel_values": image}
    if one.inputs == "images and text":
        return {**text, "pixel_values": image[:, None]}
    if one.inputs == "text and features":
        return {**text, "visual_embeds": torch.randn(2, 3, 16, dtype=dtype)}
    if one.inputs == "text and boxes":
        return {**text, "bbox": torch.randint(0, 30, (2, length, 4)).sort(-1).values}
    if one.inputs == "text with an image":
        ids[:, 1:17] = 5  # the places of the 16 patches
        return {**text, "pixel_values": image}
    if one.inputs == "text with tiles":
        ids[:, 1:5] = 5  # the places of the 16 patches of a tile, of which four have one place
        return {**text, "pixel_values": image[:, None]}
    raise ValueError(one.inputs)


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    return size[0] if isinstance(size, (list, tuple)) else size
