"""Published models by name."""

from dataclasses import replace

from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.model_shape import ModelShape


def _gpt(name: str, layers: int, hidden: int, heads: int, *, positions: int = 1024) -> ModelShape:
    return ModelShape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=50257, positions=positions)


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, *, kv_heads: int = 0, vocab: int = 32000
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        bias=False,
        norm_bias=False,
        tied=False,
    )


_MODELS = (
    _gpt("gpt2", 12, 768, 12),
    _gpt("gpt2-medium", 24, 1024, 16),
    _gpt("gpt2-large", 36, 1280, 20),
    _gpt("gpt2-xl", 48, 1600, 25),
    _gpt("gpt3-1.3b", 24, 2048, 16, positions=2048),
    _gpt("gpt3-2.7b", 32, 2560, 32, positions=2048),
    _gpt("gpt3-6.7b", 32, 4096, 32, positions=2048),
    _gpt("gpt3-13b", 40, 5120, 40, positions=2048),
    _gpt("gpt3-175b", 96, 12288, 96, positions=2048),
    _llama("llama-7b", 32, 4096, 32, 11008),
    _llama("llama-13b", 40, 5120, 40, 13824),
    _llama("llama-33b", 60, 6656, 52, 17920),
    _llama("llama-65b", 80, 8192, 64, 22016),
    _llama("llama-70b", 80, 8192, 64, 28672, kv_heads=8),
    _llama("llama3-8b", 32, 4096, 32, 14336, kv_heads=8, vocab=128256),
    _llama("llama3-70b", 80, 8192, 64, 28672, kv_heads=8, vocab=128256),
    _llama("llama3-405b", 126, 16384, 128, 53248, kv_heads=8, vocab=128256),
    _llama("mistral-7b", 32, 4096, 32, 14336, kv_heads=8),
    replace(
        _llama("mixtral-8x7b", 32, 4096, 32, 14336, kv_heads=8),
        experts=8,
        experts_active=2,
    ),
    replace(_llama("qwen2-7b", 28, 3584, 28, 18944, kv_heads=4, vocab=152064), qkv_bias=True),
    ModelShape(
        name="bert-large",
        layers=24,
        hidden=1024,
        heads=16,
        vocab=30522,
        positions=512,
        final_norm=False,
        root_extra=2 * 1024 + 2 * 1024,  # token types and the embedding norm
        head_extra=1024 * 1024 + 1024,  # pooler
    ),
    _gpt("infinity-0.1t", 80, 10240, 128),
    _gpt("infinity-0.5t", 100, 20480, 160),
    _gpt("infinity-1t", 128, 25600, 256),
    _gpt("infinity-10t", 195, 65536, 512),
    _gpt("infinity-100t", 315, 163840, 1024),
)

MODEL_PRESETS = {shape.name: shape for shape in _MODELS}

_ALIASES = {
    "llama2-7b": "llama-7b",
    "llama2-13b": "llama-13b",
    "llama2-70b": "llama-70b",
    "gpt2-small": "gpt2",
}


def model_preset(name: str) -> ModelShape:
    """The preset called ``name``. Raises PlanError with the known names."""
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in MODEL_PRESETS:
        raise PlanError(f"model: {name!r} is no preset and no file; presets: {', '.join(MODEL_PRESETS)}")
    return MODEL_PRESETS[key]
