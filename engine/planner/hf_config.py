"""Model shapes from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.model_shape import ModelShape, ParamInventory


@dataclass(frozen=True, kw_only=True)
class _Family:
    """In what a decoder of equal blocks differs from Llama's: what its config does not say, or says by default."""

    grouped: bool = True
    """The number of key and value heads must be given; else it is that of the heads by default."""
    gated: bool = True
    bias: str = ""
    """The field that gives biases to all linear layers and the norms."""
    qkv_bias: bool = False
    qkv_field: str = ""
    """The field that gives biases to q, k and v."""
    norm_bias: bool = False
    norms_per_layer: int = 2
    final_norm: bool = True
    qk_norm: bool = False
    head_dim: int = 0
    tied: bool = False
    head_bias: bool = False
    experts: str = ""
    """The field that gives an expert's width, where every block has experts."""
    without: tuple[str, ...] = ()
    """Fields that must be absent or false: with them it is another model."""


_BIASES = ("attention_bias", "mlp_bias")
_EVERY_BLOCK = ("decoder_sparse_step", "moe_layer_freq")
_FAMILIES = {
    **dict.fromkeys(("llama", "phi3", "granite"), _Family(grouped=False)),
    **dict.fromkeys(("mistral", "ministral"), _Family()),
    "mixtral": _Family(experts="intermediate_size"),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True, head_dim=128),
    "qwen3_moe": _Family(
        qk_norm=True,
        head_dim=128,
        experts="moe_intermediate_size",
        without=("mlp_only_layers", "shared_expert_intermediate_size"),
    ),
    "gemma": _Family(head_dim=256, tied=True),
    "gemma2": _Family(head_dim=256, tied=True, norms_per_layer=4),
    "gemma3_text": _Family(head_dim=256, tied=True, norms_per_layer=4, qk_norm=True),
    "smollm3": _Family(tied=True),
    "olmo": _Family(grouped=False, norms_per_layer=0, final_norm=False),
    "cohere": _Family(grouped=False, tied=True, norms_per_layer=1, without=("use_qk_norm",)),
    "stablelm": _Family(norm_bias=True, qkv_field="use_qkv_bias", without=("use_parallel_residual", "qk_layernorm")),
    "starcoder2": _Family(gated=False, bias="use_bias", norm_bias=True, tied=True),
    "phi": _Family(
        grouped=False,
        gated=False,
        bias="bias",
        norm_bias=True,
        norms_per_layer=1,
        head_bias=True,
        without=("qk_layernorm",),
    ),
}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "bert": "BertModel",
    "roberta": "RobertaModel",
}


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

    def get(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number of at least ``least``, or the default when the field is absent or null."""
        return default if self._values.get(name) is None else self._whole(name, least)

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

    def _whole(self, name: str, least: int = 1) -> int:
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(f"{self._source}: {name} is {value!r}; want a whole number of at least {least}")
        return value


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether ``shape_from_config`` counts the very class that the config names (where it names none, the usual one)."""
    kind, classes = str(config.get("model_type") or ""), config.get("architectures") or ()
    usual = _CLASSES.get(kind)
    named = str(classes[0]) if isinstance(classes, list | tuple) and classes else usual or "ForCausalLM"
    alike = named == usual if usual else named.endswith("ForCausalLM")
    if not alike or kind not in (*_FAMILIES, *_READERS):
        return False
    if any(config.get(field, 1) not in (1, None) for field in _EVERY_BLOCK):
        return False
    width = config.get("hidden_size")
    if config.get("word_embed_proj_dim", width) != width:  # a table of another width than the blocks
        return False
    return kind in _READERS or not any(config.get(field) for field in (*_BIASES, *_FAMILIES[kind].without))


def shape_from_config(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelShape:
    """The shape that a config describes. Raises PlanError that names the missing or wrong field, or what is not known."""
    kind = str(config.get("model_type") or "")
    fields = _Fields(config, source, kind or "not given")
    if kind in _READERS:
        return _READERS[kind](fields, name)
    if kind in _FAMILIES:
        return _decoder(fields, name, _FAMILIES[kind])
    if not kind:
        raise PlanError(f"{source}: model_type is missing; write llama for a model of that kind")
    raise PlanError(
        f"{source}: model_type {kind!r} is not known; known are {', '.join(sorted((*_FAMILIES, *_READERS)))}"
    )


def usual_shape(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelShape | None:
    """Heads, widths and experts by the usual names of fields, whatever the model type, for a model whose parameters are counted
    elsewhere; None where they are not all given."""
    try:
        if is_known(config):
            return shape_from_config(config, name=name, source=source)
        inner = config.get("text_config")
        values = inner if isinstance(inner, Mapping) and "num_hidden_layers" not in config else config
        activation = f"{values.get('hidden_act') or values.get('hidden_activation') or ''}"
        gated = any(part in activation for part in ("silu", "swiglu", "gelu_pytorch_tanh"))
        return _decoder(
            _Fields(values, source, str(values.get("model_type"))), name, _Family(gated=gated, grouped=False)
        )
    except PlanError:
        return None


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
        root_extra=fields.get("type_vocab_size", 2, least=0) * hidden + 2 * hidden,
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
    notes = ["encoder and decoder blocks are planned one after the other at the same sequence length"]
    if not fields.flag("tie_word_embeddings", True):
        notes.append("counted with the head tied, as transformers builds it whatever tie_word_embeddings says")
    attention = 4 * hidden * inner
    feed_forward = (3 if gated else 2) * hidden * ffn
    buckets = fields.get("relative_attention_num_buckets", 32) * heads
    sides = ((encoder, attention + feed_forward + 2 * hidden), (decoder, 2 * attention + feed_forward + 3 * hidden))
    # The first block of each side has its table of relative positions.
    blocks = tuple(block + (0 if index else buckets) for count, block in sides for index in range(count))
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
        inventory=ParamInventory(
            before=(vocab * hidden,),
            blocks=blocks,
            after=(2 * hidden,),
            largest_param=max(vocab * hidden, hidden * ffn, hidden * inner),
        ),
        notes=tuple(notes),
    )


def _deepseek(fields: _Fields, name: str) -> ModelShape:
    """Latent attention (queries, keys and values by way of narrow matrices); dense blocks, then blocks with experts."""
    layers, hidden, heads = (fields.need(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    plain, rotary, value = fields.need("qk_nope_head_dim"), fields.need("qk_rope_head_dim"), fields.need("v_head_dim")
    narrow_q, narrow_kv = fields.get("q_lora_rank", 0, least=0), fields.need("kv_lora_rank")
    query = heads * (plain + rotary)
    attention = narrow_q * (hidden + 1 + query) if narrow_q else hidden * query
    attention += hidden * (narrow_kv + rotary) + narrow_kv * (1 + heads * (plain + value)) + heads * value * hidden
    experts, active, shared = (
        fields.need("n_routed_experts"),
        fields.need("num_experts_per_tok"),
        fields.get("n_shared_experts", 0, least=0),
    )
    dense = min(fields.get("first_k_dense_replace", 0, least=0), layers)
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


def _decoder(fields: _Fields, name: str, family: _Family) -> ModelShape:
    layers, hidden = fields.need("num_hidden_layers", "n_layer"), fields.need("hidden_size", "n_embd")
    heads, vocab = fields.need("num_attention_heads", "n_head"), fields.need("vocab_size")
    named = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = fields.need(*named) if family.experts else max(fields.get(field, 0, least=0) for field in named)
    ffn = fields.need(family.experts) if family.experts else fields.get("moe_intermediate_size", 0) if experts else 0
    bias = bool(family.bias) and fields.flag(family.bias, True)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.need("num_key_value_heads") if family.grouped else fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", 0) or family.head_dim,
        ffn=ffn or fields.need("intermediate_size"),
        vocab=vocab,
        gated=family.gated,
        bias=bias,
        qkv_bias=bias or family.qkv_bias or (bool(family.qkv_field) and fields.flag(family.qkv_field, False)),
        qk_norm=family.qk_norm,
        norm_bias=family.norm_bias,
        norms_per_layer=family.norms_per_layer,
        final_norm=family.final_norm,
        tied=fields.flag("tie_word_embeddings", family.tied),
        head_bias=family.head_bias,
        experts=experts,
        experts_active=fields.need("num_experts_per_tok", "num_experts_per_token") if experts else 0,
    )


_READERS = {"gpt2": _gpt2, "gpt_neox": _neox, "opt": _opt, "bloom": _bloom, "t5": _t5, "bert": _bert, "roberta": _bert}
_READERS |= {"deepseek_v2": _deepseek, "deepseek_v3": _deepseek}
