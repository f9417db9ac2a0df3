"""Tiny Hugging Face models with random weights, from configurations; nothing is downloaded. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY, LENGTH = 99, 64
IDS = torch.arange(20).reshape(2, 10) % 97 + 1
SPECIAL = {"bos_token_id": 1, "eos_token_id": 98}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                         "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
GROUPED = {**SMALL, "num_key_value_heads": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
          "patch_size": 8}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCABULARY, "decoder_start_token_id": 2}
WHISPER = {**SEQ2SEQ, **SPECIAL, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": LENGTH,
           "pad_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None}
DEEPSEEK = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "first_k_dense_replace": 1}


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


TEXT = {"input_ids": IDS, "labels": IDS}
IMAGES = {"pixel_values": noise(2, 3, 32, 32), "labels": torch.tensor([1, 3])}


@dataclass(frozen=True)
class Example:
    """A model and one batch, with which it gives a loss. ``prompt``: what `generate` starts from."""

    make: Callable[[], nn.Module]
    batch: dict[str, Any]
    prompt: str | None = None


def text(name: str, config: str, prompt: str | None = "input_ids", **values: Any) -> Example:
    return Example(lambda: getattr(hf, name)(getattr(hf, config)(**values)), TEXT, prompt)


def images(name: str, config: str, **values: Any) -> Example:
    return Example(lambda: getattr(hf, name)(getattr(hf, config)(**values, num_labels=5)), IMAGES)


MODELS = {
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY,
                 n_positions=LENGTH, **SPECIAL),
    "llama": text("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "mamba": text("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8),
    "bert": text("BertForMaskedLM", "BertConfig", None, **SMALL),
    "t5": text("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
               vocab_size=VOCABULARY, decoder_start_token_id=0),
    "vit": images("ViTForImageClassification", "ViTConfig", **VISION),
    "clip": Example(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config={**SMALL, **SPECIAL}, vision_config=VISION, projection_dim=16)),
        {"input_ids": IDS, "pixel_values": IMAGES["pixel_values"], "return_loss": True},
    ),
    "whisper": Example(
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        {"input_features": noise(2, 16, 64), "labels": IDS},
        "input_features",
    ),
    "gemma": text("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=8),
    "phi": text("PhiForCausalLM", "PhiConfig", **SMALL, **SPECIAL),
    "opt": text("OPTForCausalLM", "OPTConfig", hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
                vocab_size=VOCABULARY, max_position_embeddings=LENGTH, word_embed_proj_dim=32),
    "distilbert": text("DistilBertForMaskedLM", "DistilBertConfig", None, dim=32, n_layers=2, n_heads=4, hidden_dim=64,
                       vocab_size=VOCABULARY, max_position_embeddings=LENGTH),
    "roberta": text("RobertaForMaskedLM", "RobertaConfig", None, **SMALL),
    "deberta": text("DebertaV2ForMaskedLM", "DebertaV2Config", None, **SMALL, relative_attention=True,
                    pos_att_type=["p2c", "c2p"]),
    "bart": text("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ, max_position_embeddings=LENGTH,
                 forced_eos_token_id=None),
    "swin": images("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
                   num_heads=[2, 4], window_size=4),
    "convnext": images("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "resnet": images("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 24, 32],
                     depths=[1, 1, 1, 1]),
    "falcon": text("FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   vocab_size=VOCABULARY, **SPECIAL),
    "bloom": text("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, **SPECIAL),
    "gpt_neox": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL, **SPECIAL),
    "gemma3": text("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=4),
    "qwen3_moe": text("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4,
                      num_experts_per_tok=2),
    "deepseek_v3": text("DeepseekV3ForCausalLM", "DeepseekV3Config", **SMALL, **DEEPSEEK),
    "mamba2": text("Mamba2ForCausalLM", "Mamba2Config", hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8,
                   num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "rwkv": text("RwkvForCausalLM", "RwkvConfig", hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY,
                 attention_hidden_size=32, intermediate_size=64, context_length=LENGTH, **SPECIAL),
    "xlnet": text("XLNetLMHeadModel", "XLNetConfig", None, d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=VOCABULARY),
    "electra": text("ElectraForMaskedLM", "ElectraConfig", None, **SMALL, embedding_size=16),
    "mobilebert": text("MobileBertForMaskedLM", "MobileBertConfig", None, **{**SMALL, "embedding_size": 32},
                       intra_bottleneck_size=32, true_hidden_size=32),
    "pegasus": text("PegasusForConditionalGeneration", "PegasusConfig", **SEQ2SEQ, max_position_embeddings=LENGTH,
                    forced_eos_token_id=None),
    "mobilevit": images("MobileViTForImageClassification", "MobileViTConfig", image_size=32, hidden_sizes=[16, 16, 16],
                        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 16], patch_size=2, num_attention_heads=2),
    "clipseg": Example(
        lambda: hf.CLIPSegForImageSegmentation(hf.CLIPSegConfig(
            text_config={**SMALL, **SPECIAL}, vision_config=VISION, projection_dim=16, reduce_dim=16, extract_layers=[0, 1],
            decoder_num_attention_heads=2, decoder_intermediate_size=32)),
        {"input_ids": IDS, "pixel_values": IMAGES["pixel_values"], "labels": noise(2, 32, 32).round()},
    ),
}
