"""Hugging Face models from tiny configs, built without a download, and batches for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 160


def gpt2() -> nn.Module:
    """Tied head, learned positions, fused qkv."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=32,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def llama() -> nn.Module:
    """Grouped key/value heads, rotary positions in buffers, untied head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def bert() -> nn.Module:
    """Tied decoder with a bias of its own, token types, a padding mask."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head; relative position bias in the first block only."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    """Experts, of which few are used in a step."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            output_router_logits=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def causal_batch(index: int) -> dict[str, Any]:
    tokens = torch.randint(2, VOCAB, (2, 12), generator=torch.Generator().manual_seed(index))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask, "use_cache": False}


def short_batch(index: int) -> dict[str, Any]:
    """So few tokens that most experts see none."""
    tokens = torch.randint(2, VOCAB, (1, 2), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


def masked_batch(index: int) -> dict[str, Any]:
    batch = causal_batch(index)
    del batch["use_cache"]
    batch["token_type_ids"] = (torch.arange(12) > 5).long().expand(2, 12)
    return batch


def pair_batch(index: int) -> dict[str, Any]:
    batch = causal_batch(index)
    batch["labels"] = batch["labels"][:, :7].clone()
    batch["labels"][0, 5:] = -100
    return batch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "gpt2": (gpt2, causal_batch),
    "llama": (llama, causal_batch),
    "bert": (bert, masked_batch),
    "t5": (t5, pair_batch),
    "mixtral": (mixtral, short_batch),
}
