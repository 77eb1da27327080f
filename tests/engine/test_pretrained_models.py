"""Whole weights out and in: transformers loads what is written, ties are right, placeholders never get out (D-07, D-09)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from small_model import batch, build, on_nvme, settings
from torch import nn

from lamina.engine import initialize
from lamina.zero import GatheredParameters, get_full

SMALL = {"width": 32, "hidden": 64, "blocks": 2}

with pytest.MonkeyPatch.context() as _offline:
    _offline.setenv("HF_HUB_OFFLINE", "1")
    import transformers


def hf_model(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "gpt2":
        shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    tied = kind == "llama tied"
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, tie_word_embeddings=tied))


def tokens(index: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama tied"])
def test_transformers_loads_what_was_trained_with_the_same_logits(kind: str, precision: str, tmp_path: Path) -> None:
    common = {} if precision == "fp32" else {precision: {"enabled": True}}
    model = hf_model(kind)
    config = settings(**common, **on_nvme(tmp_path / "n"))
    with initialize(model, config=config)[0] as engine:
        for index in range(2):
            engine.backward(engine(input_ids=tokens(index), labels=tokens(index)).loss)
            engine.step()
        engine.save_pretrained(tmp_path / "out")
        engine.eval()
        with torch.no_grad():
            wanted = engine(input_ids=tokens(9)).logits.clone()
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=tokens(9)).logits, wanted)


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_weights_of_transformers_go_in_shard_by_shard(where: str, tmp_path: Path) -> None:
    source = hf_model("llama")
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    model = hf_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra = on_nvme(tmp_path / "n") if where == "nvme" else {}
    with initialize(model, config=settings(**extra))[0] as engine:
        report = engine.load_pretrained(tmp_path / "hf")
        assert (report.missing, report.unexpected) == ((), ())
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(input_ids=tokens(3)).logits, source.eval()(input_ids=tokens(3)).logits)
        state = dict(source.state_dict())
        save_file(
            {"extra": torch.zeros(1), **{k: v.contiguous() for k, v in list(state.items())[1:]}},
            tmp_path / "w.safetensors",
        )
        with pytest.raises(KeyError, match="not in the model: extra"):
            engine.load_pretrained(tmp_path / "w.safetensors")
        report = engine.load_pretrained(tmp_path / "w.safetensors", strict=False)
        assert (report.missing, report.unexpected) == ((next(iter(state)),), ("extra",))


def test_weights_of_a_base_model_go_into_a_model_with_a_head(tmp_path: Path) -> None:
    source = hf_model("gpt2")
    source.transformer.save_pretrained(tmp_path / "hf")
    model = hf_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    with initialize(model, config=settings())[0] as engine:
        engine.load_pretrained(tmp_path / "hf")
        assert torch.equal(get_full(model.transformer.wte.weight), source.transformer.wte.weight)


class TwoTies(nn.Module):
    """Two independent tied pairs, neither first in the model, and a shared whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.tied_b = nn.Linear(8, 8, bias=False)
        self.tied_a = nn.Linear(8, 8, bias=False)
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.tied_a.weight, self.tied_b.weight = self.a.weight, self.b.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.a, self.b, self.tied_b, self.tied_a, self.shared, self.again):
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_d07_ties_are_right_and_a_strict_load_passes(where: str, tmp_path: Path) -> None:
    model = TwoTies()
    extra = on_nvme(tmp_path / "n") if where == "nvme" else {}
    with initialize(model, config=settings(**extra))[0] as engine:
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        engine.save_pretrained(tmp_path / "out", max_shard_size=300)
        engine.save_pretrained(tmp_path / "one")
        state = model.state_dict()
        wanted = {name: get_full(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    fresh = TwoTies()
    missing, unexpected = load_model(fresh, tmp_path / "one" / "model.safetensors", strict=True)
    assert (list(missing), list(unexpected)) == ([], [])
    assert fresh.tied_a.weight is fresh.a.weight
    for name, parameter in fresh.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, wanted[name])
    again = TwoTies()
    again.load_state_dict(state, strict=True)
    assert all(torch.equal(p, wanted[name]) for name, p in again.named_parameters(remove_duplicate=False))
    assert not torch.equal(wanted["a.weight"], wanted["b.weight"])


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_d09_state_dicts_are_whole_or_an_error(where: str, tmp_path: Path) -> None:
    model = build(**SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extra = on_nvme(tmp_path / "n") if where == "nvme" else {}
    with initialize(model, config=settings(**extra))[0] as engine:
        for state, prefix in ((model.state_dict(), ""), (model.blocks[1].state_dict(), "blocks.1.")):
            for name, value in state.items():
                assert torch.equal(value, before[prefix + name])
        with GatheredParameters(model.head, modifier_rank=0):
            model.head.weight.data.zero_()
            assert model.state_dict()["head.weight"].abs().sum() == 0
        loss = engine(*batch(0))  # some groups are in memory now
        old = model.state_dict()
        engine.backward(loss)
        engine.step()
        assert not torch.equal(model.state_dict()["blocks.0.up.weight"], before["blocks.0.up.weight"])
        if where == "nvme":
            assert torch.equal(old["blocks.0.up.weight"], before["blocks.0.up.weight"])
    if where == "nvme":
        with pytest.raises(RuntimeError, match="not in memory, and the engine that had it was closed"):
            model.state_dict()
        with pytest.raises(ValueError, match="placeholders of an engine that was closed"):
            initialize(model, config=settings())


@pytest.mark.parametrize("gather", [True, False])
def test_d09_the_16_bit_save_is_whole_whatever_the_gather_key_says(gather: bool, tmp_path: Path) -> None:
    config = settings(bf16={"enabled": True}, **on_nvme(tmp_path / "n"))
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
    model = build(**SMALL)
    shapes = {name: value.shape for name, value in model.state_dict().items() if name != "head.weight"}
    with initialize(model, config=config)[0] as engine:
        assert engine.save_16bit_model(tmp_path / "out", "weights.safetensors")
        with pytest.raises(ValueError, match=r"written as safetensors"):
            engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
        engine.save_pretrained(tmp_path / "full", dtype=torch.float32)
        masters = {name: get_full(parameter, "master") for name, parameter in model.named_parameters()}
    written = load_file(tmp_path / "out" / "weights.safetensors")
    assert {name: value.shape for name, value in written.items()} == shapes
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    exact = load_file(tmp_path / "full" / "model.safetensors")
    assert all(torch.equal(exact[name], master) for name, master in masters.items())
    with safe_open(tmp_path / "out" / "weights.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert sorted(os.listdir(tmp_path / "out")) == ["weights.safetensors"]


def test_other_pickles_are_not_read_and_indices_stay_inside(tmp_path: Path) -> None:
    with initialize(build(**SMALL), config=settings())[0] as engine:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read"):
            engine.load_pretrained(tmp_path)
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "training_args.bin")
        with pytest.raises(FileNotFoundError, match=r"no \.safetensors file and no pytorch_model\.bin"):
            engine.load_pretrained(tmp_path)
        index = {"weight_map": {"a": "../a.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="outside"):
            engine.load_pretrained(tmp_path)


@dataclass(frozen=True)
class Evil:
    """What a pickle may do when it is loaded: it makes this folder."""

    folder: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["one file", "sharded", "wrapped"])
def test_consolidated_state_dicts_of_deepspeed_are_read(form: str, tmp_path: Path) -> None:
    """As zero_to_fp32 writes them: fp32, names of the module, ties written twice; into bf16 with exact masters on NVMe."""
    torch.manual_seed(3)
    weights = {name: torch.randn_like(value) for name, value in build(**SMALL).state_dict().items()}
    weights["head.weight"] = weights["embed.weight"]
    (tmp_path / "w").mkdir()
    if form == "sharded":
        half = len(weights) // 2
        parts = {
            f"pytorch_model-{part + 1:05d}-of-00002.bin": dict(list(weights.items())[part * half :][: half + part])
            for part in range(2)
        }
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (tmp_path / "w" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        wrapped = {"module": weights, "dp_world_size": 2, "optimizer": None}
        parts = {"pytorch_model.bin": weights if form == "one file" else wrapped}
    for file, content in parts.items():
        torch.save(content, tmp_path / "w" / file)
    config = settings(bf16={"enabled": True}, **on_nvme(tmp_path / "n"))
    with initialize(build(**SMALL), config=config)[0] as engine:
        report = engine.load_pretrained(tmp_path / "w")
        assert (report.missing, report.unexpected) == ((), ())
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(get_full(parameter, "master"), weights[name]), name
        engine.backward(engine(*batch(0)))
        engine.step()


def test_state_dicts_that_would_run_code_are_refused(tmp_path: Path) -> None:
    weights, evil = build(**SMALL).state_dict(), Evil(tmp_path / "made by a pickle")
    for name, content in {"evil": {**weights, "x": evil}, "empty": {"a": 1}, "garbage": b"no zip file"}.items():
        path = tmp_path / f"{name}.bin"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with initialize(build(**SMALL), config=settings())[0] as engine:
            before = [get_full(parameter) for parameter in engine.module.parameters()]
            with pytest.raises(ValueError, match=rf"{name}\.bin (holds|cannot be read)"):
                engine.load_pretrained(path)
            assert all(map(torch.equal, before, [get_full(parameter) for parameter in engine.module.parameters()]))
    assert not evil.folder.exists()
