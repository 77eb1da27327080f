"""Small configs of Hugging Face families."""

from typing import Any

SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 96, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **SMALL,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
    },
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16},
    "gemma3_text": {**GROUPED, "head_dim": 16},
    "granite": GROUPED,
    "olmo": GROUPED,
    "cohere": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "phi": GROUPED,
    "qwen3_moe": {
        **SMALL,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "gpt_neox": {**SMALL, "intermediate_size": 48},
    "opt": {**SMALL, "ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": 96, "n_layer": 2, "hidden_size": 32, "n_head": 4},
    "bert": {**SMALL, "intermediate_size": 48, "max_position_embeddings": 16, "type_vocab_size": 2},
    "t5": {"vocab_size": 96, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48, "d_kv": 8},
}


CONFIGS["deepseek_v2"] = CONFIGS["deepseek_v3"]
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {**SMALL, "multi_query": True},
    "bart": {
        **{"d_model": 32, "vocab_size": 96, "max_position_embeddings": 16},
        **{f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    },
    "vit": {**SMALL, "intermediate_size": 48, "image_size": 8, "patch_size": 4},
    "mamba": {"vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 32, "state_size": 4},
    "llama": {**GROUPED, "attention_bias": True},
    "opt": {**SMALL, "ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 16},
    "bert": {**SMALL, "intermediate_size": 48, "architectures": ["BertForMaskedLM"]},
    "albert": {**SMALL, "intermediate_size": 48, "embedding_size": 16},
    "qwen2_moe": {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Families and variants that are not read by their fields."""
