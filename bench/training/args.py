"""The options of `lamina train`, and the run that they describe together with a config file."""

import argparse
import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamina.bench.training.gpt import PRESETS, GPTShape
from lamina.engine.config import ConfigError
from lamina.engine.config.quantities import parse_quantity
from lamina.engine.config.source import read_source

DTYPES = ("bf16", "fp32", "fp16")
DEFAULT_NVME_PATH = "./lamina-nvme"
DEFAULT_SEED = 1
FINAL_LR_RATIO = 0.1
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that decides the numbers of one training run, and where its state may lie."""

    size: str
    """Name of the preset, or "custom"."""
    shape: GPTShape
    batch: int
    """Sequences per micro-batch."""
    accum: int
    """Micro-batches per optimizer step."""
    steps: int
    dtype: str
    seed: int
    config: Mapping[str, Any]
    """The engine's config, in DeepSpeed's dialect, complete but for the NVMe path."""
    nvme_path: Path | None
    """Folder for the state, absolute. None: the config file names its own."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accum * self.shape.seq

    def engine_config(self) -> dict[str, Any]:
        """The config of the run under its budgets, with the NVMe path filled in."""
        config = copy.deepcopy(dict(self.config))
        if self.nvme_path is not None:
            config.setdefault("tiers", {})["nvme"] = [{"path": str(self.nvme_path)}]
        return config

    def in_memory_config(self) -> dict[str, Any]:
        """The same training with all state in memory: no budgets, no NVMe."""
        config = copy.deepcopy(dict(self.config))
        tiers = config.setdefault("tiers", {})
        for key in ("device_bytes", "host_bytes", "nvme", "placement"):
            tiers.pop(key, None)
        zero = config["zero_optimization"]
        zero["offload_param"] = {"device": "none"}
        zero["offload_optimizer"] = {"device": "cpu"}
        return config


def parser() -> argparse.ArgumentParser:
    """Options without defaults of their own: what is not given comes from --config or from the size."""
    make = argparse.ArgumentParser(
        prog="lamina train",
        description="Train a byte-level GPT on real text, its state on NVMe or within a memory budget.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=None,
        allow_abbrev=False,
        epilog="Without --device-bytes and --host-bytes all state lies on NVMe; with either, what fits\n"
        "stays in memory. Exit codes: 0 success, 1 failure, 2 wrong input, 130 Ctrl-C, 143 SIGTERM.",
    )
    model = make.add_argument_group("model")
    model.add_argument("--size", choices=tuple(PRESETS), help="about 3, 25, 100 or 350 million parameters (small)")
    model.add_argument("--layers", type=_positive, metavar="N", help="transformer blocks")
    model.add_argument("--dim", type=_positive, metavar="N", help="width; best a multiple of 16")
    model.add_argument("--heads", type=_positive, metavar="N", help="attention heads")
    tied = model.add_mutually_exclusive_group()
    tied.add_argument("--tied", action="store_true", dest="tied", help="the head is the embedding")
    tied.add_argument("--untied", action="store_false", dest="tied", help="the head has its own weight (default)")
    model.add_argument("--seq", type=_positive, metavar="N", help="context in bytes (256; tiny: 128)")

    training = make.add_argument_group("training")
    training.add_argument("--text", metavar="FILE_OR_DIR", help="text (the standard library's sources)")
    training.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps")
    training.add_argument("--batch", type=_positive, metavar="N", help="sequences per micro-batch")
    training.add_argument("--accum", type=_positive, metavar="N", help="micro-batches per step (1)")
    training.add_argument("--dtype", choices=DTYPES, help="compute format (bf16; fp32 on a CPU without bf16)")
    training.add_argument("--lr", type=_rate, metavar="X", help="highest learning rate")
    training.add_argument("--clip", type=_rate, metavar="X", help="largest gradient norm (0: no clipping)")
    training.add_argument("--seed", type=_seed, metavar="N", help="seed of weights, data and sample (1)")

    state = make.add_argument_group("where the state lies")
    state.add_argument("--device-bytes", type=_bytes, metavar="SIZE", help="device memory, for example 96MiB or 1GB")
    state.add_argument("--host-bytes", type=_bytes, metavar="SIZE", help="host memory")
    state.add_argument("--nvme-path", metavar="DIR", help=f"folder for state on NVMe ({DEFAULT_NVME_PATH})")
    state.add_argument("--config", metavar="FILE", help="JSON config in DeepSpeed's dialect; options override it")

    output = make.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="train again in memory and in plain PyTorch")
    output.add_argument("--sample", type=_count, metavar="N", default=160, help="bytes of text to generate (160)")
    output.add_argument("--temperature", type=_rate, metavar="X", default=0.8, help="of the sample; 0: greedy (0.8)")
    output.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the run (Perfetto)")
    output.add_argument(
        "--timeline", metavar="FILE.png", help="draw one step of the run; its trace: --trace, or FILE.json"
    )
    output.add_argument("--json", action="store_true", help="one JSON line on stdout, the report on stderr")
    return make


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, TrainingRun]:
    """Options and the run they describe. Raises ConfigError and ValueError; SystemExit as argparse does."""
    given = parser().parse_args(arguments)
    if given.timeline is not None and given.trace is None:
        given.trace = str(Path(given.timeline).with_suffix(".json"))
    return given, resolve(given)


def resolve(given: argparse.Namespace) -> TrainingRun:
    """Merge options over the config file over the size's defaults."""
    file: dict[str, Any] = {}
    if given.config is not None:
        file, _ = read_source(given.config)
    shape = resolve_shape(given)
    custom = given.size is None and (given.layers or given.dim or given.heads)
    defaults = SIZE_DEFAULTS[given.size or "small"]
    dtype = given.dtype or _dtype_of(file) or default_dtype()
    steps = given.steps or defaults.steps
    config = _merge(file, _options_config(given, steps=steps, defaults=defaults, file=file, dtype=dtype))
    return TrainingRun(
        size="custom" if custom else given.size or "small",
        shape=shape,
        batch=config["train_micro_batch_size_per_gpu"],
        accum=config["gradient_accumulation_steps"],
        steps=steps,
        dtype=dtype,
        seed=DEFAULT_SEED if given.seed is None else given.seed,
        config=config,
        nvme_path=_nvme_path(given, file),
    )


@dataclass(frozen=True, kw_only=True)
class SizeDefaults:
    """Training options that suit a size."""

    steps: int
    batch: int
    lr: float


SIZE_DEFAULTS = {
    "tiny": SizeDefaults(steps=200, batch=8, lr=1e-3),
    "small": SizeDefaults(steps=200, batch=4, lr=1e-3),
    "base": SizeDefaults(steps=60, batch=4, lr=6e-4),
    "large": SizeDefaults(steps=20, batch=2, lr=4e-4),
}


def resolve_shape(given: argparse.Namespace) -> GPTShape:
    """The size's shape with single numbers replaced. Heads follow the width where only that is given."""
    shape = PRESETS[given.size or "small"]
    heads = given.heads
    if heads is None and given.dim is not None:
        heads = next(h for h in range(max(1, given.dim // 64), 0, -1) if given.dim % h == 0)
    changes = {"layers": given.layers, "dim": given.dim, "heads": heads, "seq": given.seq, "tied": given.tied}
    return dataclasses.replace(shape, **{name: value for name, value in changes.items() if value is not None})


def _options_config(
    given: argparse.Namespace, *, steps: int, defaults: SizeDefaults, file: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The part of the config that options and defaults decide; a default gives way to the file."""
    options = _batch_options(given, file, defaults)
    if given.clip is not None or "gradient_clipping" not in file:
        options["gradient_clipping"] = given.clip or 0.0
    if given.dtype is not None or not _dtype_of(file):
        options |= {name: {"enabled": name == dtype} for name in ("bf16", "fp16")}
    optimizer = {
        "type": "AdamW",
        "params": {"betas": list(BETAS), "weight_decay": WEIGHT_DECAY, "lr": defaults.lr},
    }
    if "optimizer" not in file:
        options["optimizer"] = optimizer
    if given.lr is not None:
        chosen = options.setdefault("optimizer", {"params": {}})
        chosen.setdefault("params", {})["lr"] = given.lr
    if "scheduler" not in file:
        options["scheduler"] = schedule(steps)
    zero = file.get("zero_optimization", {})
    options["zero_optimization"] = _zero_options(given, zero if isinstance(zero, Mapping) else {}, file)
    budgets = {"device_bytes": given.device_bytes, "host_bytes": given.host_bytes}
    options["tiers"] = {key: value for key, value in budgets.items() if value is not None}
    return options


def _batch_options(given: argparse.Namespace, file: Mapping[str, Any], defaults: SizeDefaults) -> dict[str, Any]:
    """Micro-batch and accumulation, and the whole batch: options, then the file, then defaults."""
    total = _file_count(file, "train_batch_size")
    accum = given.accum or _file_count(file, "gradient_accumulation_steps")
    micro = given.batch or _file_count(file, "train_micro_batch_size_per_gpu")
    if micro is None and total is not None:
        micro = max(1, total // (accum or 1))
    elif accum is None and total is not None and micro is not None:
        accum = max(1, total // micro)
    micro, accum = micro or defaults.batch, accum or 1
    options = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accum}
    if given.batch or given.accum or total is None:
        options["train_batch_size"] = micro * accum  # one rank; what the file says is overridden
    return options


def _file_count(file: Mapping[str, Any], key: str) -> int | None:
    """A whole number of the file; None when it is absent or "auto"."""
    value = file.get(key)
    if value is None or value == "auto":
        return None
    try:
        count = parse_quantity(value, "count")
    except ValueError as error:
        raise ConfigError([(key, str(error))]) from error
    if count < 1:
        raise ConfigError([(key, f"want at least 1, got {value}")])
    return count


def schedule(steps: int) -> dict[str, Any]:
    """A tenth of the run (at most 20 steps) of linear warm-up, then a cosine down to FINAL_LR_RATIO."""
    warmup = min(20, max(1, steps // 10))
    return {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": steps,
            "warmup_num_steps": warmup,
            "warmup_min_ratio": 1 / (warmup + 1),
            "warmup_type": "linear",
            "cos_min_ratio": FINAL_LR_RATIO,
        },
    }


def _zero_options(given: argparse.Namespace, zero: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Stage 3, and all state on NVMe where neither budgets nor the file say where it lies."""
    options: dict[str, Any] = {} if "stage" in zero else {"stage": 3}
    decided = given.device_bytes is not None or given.host_bytes is not None or "tiers" in file
    if not decided and not {"offload_param", "offload_optimizer"} & set(zero):
        options |= {name: {"device": "nvme"} for name in ("offload_param", "offload_optimizer")}
    return options


def _nvme_path(given: argparse.Namespace, file: Mapping[str, Any]) -> Path | None:
    """--nvme-path, else the file's own (None), else the default. Absolute."""
    if given.nvme_path is not None:
        if not given.nvme_path:
            raise ValueError("--nvme-path is empty: name a folder")
        return Path(os.path.abspath(os.path.expanduser(given.nvme_path)))
    zero = file.get("zero_optimization")
    blocks = [zero.get(name) for name in ("offload_param", "offload_optimizer")] if isinstance(zero, Mapping) else []
    tiers = file.get("tiers")
    named = any(isinstance(block, Mapping) and block.get("nvme_path") for block in blocks)
    if named or (isinstance(tiers, Mapping) and tiers.get("nvme")):
        return None
    return Path(os.path.abspath(DEFAULT_NVME_PATH))


def default_dtype() -> str:
    """bf16 where this machine multiplies it in hardware; elsewhere it would be many times slower than fp32."""
    if torch.cuda.is_available():
        return "bf16"
    words = set(Path("/proc/cpuinfo").read_text(errors="replace").split())
    return "bf16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "fp32"


def _dtype_of(file: Mapping[str, Any]) -> str | None:
    """What the file computes in; None when it does not say."""
    blocks = {name: file.get(name) for name in ("bf16", "fp16")}
    for name, block in blocks.items():
        if isinstance(block, Mapping) and block.get("enabled") is True:
            return name
    return "fp32" if any(block is not None for block in blocks.values()) else None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, blocks key by key."""
    merged = copy.deepcopy(dict(below))
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        elif isinstance(value, Mapping) and key in merged:
            raise ConfigError([(key, f"want a block {{...}}, got {merged[key]!r}")])
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _bytes(text: str) -> int:
    try:
        value = parse_quantity(text, "bytes")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"want at least 1 byte, got {text}")
    return value


def _whole(text: str, *, least: int, most: int = 2**31 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a whole number, got {text!r}") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"want a whole number from {least} to {most}, got {text}")
    return value


def _positive(text: str) -> int:
    return _whole(text, least=1)


def _count(text: str) -> int:
    return _whole(text, least=0)


def _seed(text: str) -> int:
    return _whole(text, least=0, most=2**63 - 1)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a number, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"want a number of at least 0, got {text}")
    return value
