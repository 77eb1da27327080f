"""Model shapes from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.model_shape import ModelShape, ParamInventory

_LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3", "gemma", "smollm3", "olmo2"})
_KNOWN = _LLAMA_LIKE | {"deepseek_v3", "gpt2", "gpt_neox", "opt", "bloom", "bert", "roberta", "t5"}


class _Fields:
    """Reads fields of a config and complains by name."""

    def __init__(self, values: Mapping[str, Any], source: str, kind: str) -> None:
        self._values, self._source, self._kind = values, source, kind

    def need(self, *names: str) -> int:
        """The first of ``names`` that is given, a whole number of at least 1."""
        for name in names:
            if self._values.get(name) is not None:
                return self._whole(name)
        raise PlanError(
            f"{self._source}: {' or '.join(names)} is missing (model_type {self._kind}); add it, or give the model as "
            "layers=…,hidden=…,heads=…"
        )

    def get(self, name: str, default: int) -> int:
        """A whole number, or the default when the field is absent or null."""
        return default if self._values.get(name) is None else self._whole(name)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value, or the default when the field is absent or null."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"{self._source}: {name} is {value!r}; want true or false")
        return value

    def text(self, name: str) -> str:
        """A string, empty when absent."""
        return str(self._values.get(name) or "")

    def _whole(self, name: str) -> int:
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"{self._source}: {name} is {value!r}; want a whole number")
        return value


def shape_from_config(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelShape:
    """The shape that a config describes. Raises PlanError that names the missing or wrong field.

    Model types that are not known are read by their usual field names, and the shape says so in its notes.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "num_hidden_layers" not in config:
        config = inner  # multimodal: the language model is what is planned
    kind = str(config.get("model_type") or "")
    fields = _Fields(config, source, kind or "not given")
    readers = {"gpt2": _gpt2, "gpt_neox": _neox, "opt": _opt, "bloom": _bloom, "t5": _t5}
    readers["deepseek_v3"] = _deepseek
    readers |= {"bert": _bert, "roberta": _bert}
    if kind in readers:
        return readers[kind](fields, name)
    return _llama_like(fields, name, kind)


def _gpt2(fields: _Fields, name: str) -> ModelShape:
    return ModelShape(
        name=name,
        layers=fields.need("n_layer", "num_hidden_layers"),
        hidden=fields.need("n_embd", "hidden_size"),
        heads=fields.need("n_head", "num_attention_heads"),
        ffn=fields.get("n_inner", 0),
        vocab=fields.need("vocab_size"),
        positions=fields.need("n_positions", "max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _neox(fields: _Fields, name: str) -> ModelShape:
    return ModelShape(
        name=name,
        layers=fields.need("num_hidden_layers"),
        hidden=fields.need("hidden_size"),
        heads=fields.need("num_attention_heads"),
        ffn=fields.need("intermediate_size"),
        vocab=fields.need("vocab_size"),
        qkv_bias=fields.flag("attention_bias", True),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _opt(fields: _Fields, name: str) -> ModelShape:
    hidden = fields.need("hidden_size")
    width = fields.get("word_embed_proj_dim", hidden)
    if width != hidden:
        raise PlanError(f"{name}: word_embed_proj_dim {width} that differs from hidden_size {hidden} is not known")
    return ModelShape(
        name=name,
        layers=fields.need("num_hidden_layers"),
        hidden=hidden,
        heads=fields.need("num_attention_heads"),
        ffn=fields.need("ffn_dim"),
        vocab=fields.need("vocab_size"),
        positions=fields.need("max_position_embeddings") + 2,
        tied=fields.flag("tie_word_embeddings", True),
    )


def _bloom(fields: _Fields, name: str) -> ModelShape:
    hidden = fields.need("hidden_size", "n_embed")
    return ModelShape(
        name=name,
        layers=fields.need("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=fields.need("n_head", "num_attention_heads"),
        vocab=fields.need("vocab_size"),
        root_extra=2 * hidden,
        tied=fields.flag("tie_word_embeddings", True),
    )


def _bert(fields: _Fields, name: str) -> ModelShape:
    hidden = fields.need("hidden_size")
    return ModelShape(
        name=name,
        layers=fields.need("num_hidden_layers"),
        hidden=hidden,
        heads=fields.need("num_attention_heads"),
        ffn=fields.need("intermediate_size"),
        vocab=fields.need("vocab_size"),
        positions=fields.need("max_position_embeddings"),
        final_norm=False,
        root_extra=fields.get("type_vocab_size", 2) * hidden + 2 * hidden,
        head_extra=hidden * hidden + hidden,
        notes=("counted with a pooler and without a task head",),
    )


def _t5(fields: _Fields, name: str) -> ModelShape:
    hidden, heads = fields.need("d_model"), fields.need("num_heads")
    ffn, inner = fields.need("d_ff"), fields.need("d_kv") * heads
    encoder = fields.need("num_layers")
    decoder = fields.get("num_decoder_layers", encoder)
    vocab = fields.need("vocab_size")
    gated = "gated" in fields.text("feed_forward_proj")
    tied = fields.flag("tie_word_embeddings", True)
    attention = 4 * hidden * inner
    feed_forward = (3 if gated else 2) * hidden * ffn
    buckets = 2 * fields.get("relative_attention_num_buckets", 32) * heads
    blocks = (attention + feed_forward + 2 * hidden,) * encoder
    blocks += (2 * attention + feed_forward + 3 * hidden,) * decoder
    return ModelShape(
        name=name,
        layers=encoder + decoder,
        hidden=hidden,
        heads=heads,
        head_dim=inner // heads,
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        bias=False,
        norm_bias=False,
        tied=tied,
        inventory=ParamInventory(
            before=(vocab * hidden, buckets),
            blocks=blocks,
            after=(2 * hidden, 0 if tied else vocab * hidden),
            largest_param=max(vocab * hidden, hidden * ffn, hidden * inner),
        ),
        notes=("encoder and decoder blocks are planned one after the other at the same sequence length",),
    )


def _deepseek(fields: _Fields, name: str) -> ModelShape:
    """Latent attention (queries, keys and values by way of narrow matrices); dense blocks, then blocks with experts."""
    layers, hidden, heads = (fields.need(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    plain, rotary, value = fields.need("qk_nope_head_dim"), fields.need("qk_rope_head_dim"), fields.need("v_head_dim")
    narrow_q, narrow_kv = fields.get("q_lora_rank", 0), fields.need("kv_lora_rank")
    query = heads * (plain + rotary)
    attention = narrow_q * (hidden + 1 + query) if narrow_q else hidden * query
    attention += hidden * (narrow_kv + rotary) + narrow_kv * (1 + heads * (plain + value)) + heads * value * hidden
    experts, active, shared = (
        fields.need("n_routed_experts"),
        fields.need("num_experts_per_tok"),
        fields.get("n_shared_experts", 0),
    )
    dense = min(fields.get("first_k_dense_replace", 0), layers)
    expert = 3 * hidden * fields.need("moe_intermediate_size")
    block = attention + 2 * hidden
    wide = block + (experts + shared) * expert + experts * hidden
    vocab, tied = fields.need("vocab_size"), fields.flag("tie_word_embeddings", False)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=plain + rotary,
        ffn=fields.need("moe_intermediate_size"),
        vocab=vocab,
        gated=True,
        bias=False,
        norm_bias=False,
        tied=tied,
        experts=experts + shared,
        experts_active=active + shared,
        dense_layers=dense,
        inventory=ParamInventory(
            before=(vocab * hidden,),
            blocks=(block + 3 * hidden * fields.need("intermediate_size"),) * dense + (wide,) * (layers - dense),
            after=(hidden, 0 if tied else vocab * hidden),
            largest_param=max(vocab * hidden, heads * value * hidden, narrow_q * query, expert // 3),
        ),
    )


def _llama_like(fields: _Fields, name: str, kind: str) -> ModelShape:
    known = kind in _LLAMA_LIKE
    layers, hidden = fields.need("num_hidden_layers", "n_layer"), fields.need("hidden_size", "n_embd")
    heads = fields.need("num_attention_heads", "n_head")
    experts = fields.get("num_local_experts", fields.get("num_experts", 0))
    active = fields.get("num_experts_per_tok", 0)
    ffn = fields.get("moe_intermediate_size", 0) if experts else 0
    activation = fields.text("hidden_act") + fields.text("hidden_activation")
    gated = known or "silu" in activation or "swiglu" in activation or not activation
    notes = () if known else (f"model_type {kind or 'not given'} is not known: counted as a Llama-like model",)
    bias = fields.flag("attention_bias", False)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", 0) or (256 if kind == "gemma" else 128 if kind == "qwen3" else 0),
        ffn=ffn or fields.need("intermediate_size"),
        vocab=fields.need("vocab_size"),
        gated=gated,
        bias=False,
        qkv_bias=kind == "qwen2" or bias,
        qk_norm=kind == "qwen3",
        norm_bias=False,
        tied=fields.flag("tie_word_embeddings", kind in ("gemma", "smollm3")),
        experts=experts,
        experts_active=active,
        notes=notes,
    )
