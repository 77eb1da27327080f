"""Models and machines from names, files, modules and numbers; and what is said when something is missing."""

import json
import struct
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_configs import CONFIGS, GROUPED, OTHERS, SMALL
from safetensors.numpy import save_file

from lamina.bench.training.gpt import GPT, GPTShape
from lamina.engine.planner import (
    PlanError,
    Question,
    Workload,
    hf_library,
    machine_from_mapping,
    machine_preset,
    model_preset,
    plan,
    read_model,
    shape_from_module,
    this_machine,
)
from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.hf_config import shape_from_config
from lamina.engine.planner.model_shape import LoraShape
from lamina.engine.planner.quantity import format_bytes, parse_bytes, parse_number
from lamina.tiers.memory.limits import CgroupLimit, MemoryLimits

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "bert-large": 335_141_888,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert model_preset(name).total_params == PUBLISHED[name]


def test_mixture_counts_the_experts_that_a_token_passes() -> None:
    model = model_preset("mixtral-8x7b")
    assert model.active_params == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336


def test_dense_blocks_of_a_mixture_are_passed_by_every_token() -> None:
    model = shape_from_config({"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}, name="m")
    assert model.active_params == model.total_params - 1 * (4 - 2) * 3 * 32 * 16  # one block of two has experts


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        import transformers

        return transformers


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_is_counted_like_the_model_that_it_builds(kind: str, transformers: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
        family = {"bert": transformers.AutoModel, "t5": transformers.AutoModelForSeq2SeqLM}
        with torch.device("meta"):
            model = family.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert shape_from_config(config.to_dict(), name=kind).total_params == real
    assert shape_from_module(model, name=kind).total_params == real


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_without_a_needed_field_names_it(kind: str) -> None:
    optional = {"num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok"}
    optional |= {"type_vocab_size", "word_embed_proj_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"}
    optional |= {"n_group", "topk_group"}
    for field in set(CONFIGS[kind]) - optional:
        config = {"model_type": kind, **CONFIGS[kind]}
        del config[field]
        with pytest.raises(PlanError, match=f"{field}.* is missing"):
            shape_from_config(config, name=kind)


@pytest.mark.parametrize("wrong", ["12", -3, True, 2.5])
def test_config_with_a_wrong_value_names_the_field(wrong: object) -> None:
    config = {"model_type": "llama", **GROUPED, "hidden_size": wrong}
    with pytest.raises(PlanError, match="hidden_size"):
        shape_from_config(config, name="m")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama", "intermediate_size"),
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("gpt2", "n_inner"),
        ("deepseek_v3", "moe_intermediate_size"),
    ],
)
def test_a_size_of_zero_is_refused_and_not_taken_for_the_usual_one(kind: str, field: str) -> None:
    with pytest.raises(PlanError, match=f"{field} is 0; want a whole number of at least 1"):
        shape_from_config({"model_type": kind, **CONFIGS[kind], field: 0}, name="m")
    for name in ("ffn", "kv_heads", "head_dim"):
        with pytest.raises(PlanError, match=f"model: {name} is 0; .*leave it out"):
            read_model(f"layers=2,hidden=32,heads=4,{name}=0")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_are_counted_by_their_definition(kind: str, transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **OTHERS[kind]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = read_model(str(tmp_path))
        config = transformers.AutoConfig.for_model(kind, **OTHERS[kind])
        named = {"bert": transformers.BertForMaskedLM, "vit": transformers.ViTModel}
        named |= {"bart": transformers.BartModel, "albert": transformers.AlbertModel}
        with torch.device("meta"):
            model = named[kind](config) if kind in named else transformers.AutoModelForCausalLM.from_config(config)
    assert shape.total_params == sum(parameter.numel() for parameter in model.parameters())
    assert any(f"builds {type(model).__name__}" in note for note in shape.notes)
    assert not any("assumed" in note for note in shape.notes) or kind == "mamba"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "newthing", **GROUPED}, "does not know model_type 'newthing'"),
        ({"model_type": "newthing", "auto_map": {"AutoConfig": "code.New"}}, "which is not run"),
        (GROUPED, "model_type is missing"),
        ({"model_type": "falcon", **SMALL, "hidden_size": "wide"}, "cannot build a falcon model"),
        ({"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8}, "found no embedding"),
    ],
)
def test_what_nobody_knows_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlanError, match=message):
            read_model(str(tmp_path))


def test_without_transformers_it_is_said_what_would_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_library, "find_spec", lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", **SMALL}))
    with pytest.raises(PlanError, match=r"falcon.*pip install lamina\[hf\]"):
        read_model(str(tmp_path))


def tensors_of(model: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.zeros(tuple(p.shape), dtype=np.float16) for name, p in model.named_parameters()}


GPT_SHAPE = GPTShape(layers=3, dim=64, heads=4, seq=32, tied=True)


def test_module_on_meta_is_counted_without_its_values() -> None:
    with torch.device("meta"):
        model = GPT(GPT_SHAPE)
    shape = shape_from_module(model, name="gpt", heads=4)
    assert shape.total_params == GPT_SHAPE.num_params
    assert (shape.layers, shape.hidden, shape.vocab, shape.ffn_width, shape.tied) == (3, 64, 256, 256, True)
    assert shape.trainable_params == shape.total_params


def test_frozen_parameters_of_a_module_are_not_trained() -> None:
    model = GPT(GPT_SHAPE)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    shape = shape_from_module(model, name="gpt", heads=4)
    assert shape.trainable_params == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_safetensors_file_and_index_agree_with_the_module(tmp_path: Path) -> None:
    model = GPT(GPT_SHAPE)
    tensors = tensors_of(model)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model(str(tmp_path / "model.safetensors")).total_params == GPT_SHAPE.num_params
    parts = tmp_path / "parts"
    parts.mkdir()
    names = sorted(tensors)
    files = {name: f"part-{position % 2}.safetensors" for position, name in enumerate(names)}
    for part in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == part}, parts / part)
    index = parts / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert read_model(str(index)).total_params == GPT_SHAPE.num_params
    assert read_model(str(parts)).total_params == GPT_SHAPE.num_params
    (parts / "part-1.safetensors").unlink()
    with pytest.raises(PlanError, match=r"part-1\.safetensors, which is missing"):
        read_model(str(index))
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(PlanError, match="outside of the index's folder"):
        read_model(str(index))


@pytest.mark.parametrize(
    "content",
    [b"", b"1234", struct.pack("<Q", 1 << 40), struct.pack("<Q", 4) + b"{nah", struct.pack("<Q", 2) + b"[]"],
)
def test_damaged_safetensors_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"m\.safetensors"):
        read_model(str(path))


def test_config_beside_tensors_gives_what_tensors_do_not_tell(tmp_path: Path) -> None:
    config = {"model_type": "llama", **GROUPED, "vocab_size": 256, "hidden_size": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(GPT(GPT_SHAPE)), tmp_path / "model.safetensors")
    shape = read_model(str(tmp_path))
    assert shape.heads == 4
    assert shape.kv_heads == 2
    assert shape.total_params == GPT_SHAPE.num_params


def test_numbers_give_a_model() -> None:
    shape = read_model("layers=12,hidden=768,heads=12,positions=1024")
    assert shape.total_params == PUBLISHED["gpt2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=12,heads=12", "hidden missing"),
        ("layers=12,hidden=768,heads=0", "heads is 0"),
        ("layers=12,hidden=770,heads=12", "no multiple of heads"),
        ("layers=12,hidden=768,heads=12,depth=3", "'depth' is unknown"),
        ("layers=many,hidden=768,heads=12", "layers"),
        ("layers=2,hidden=64,heads=4,experts=4", "experts_active"),
        ("gpt5-nano", "presets: gpt2"),
    ],
)
def test_bad_model_names_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_model(text)


def test_lora_trains_rank_times_in_plus_out() -> None:
    base = model_preset("llama-7b")
    lora = replace(base, lora=LoraShape(rank=8, targets=("q", "v")))
    assert lora.trainable_params == 32 * 2 * 8 * (4096 + 4096)
    assert lora.total_params == base.total_params + lora.trainable_params


def test_bad_lora_names_the_target() -> None:
    with pytest.raises(PlanError, match="qv"):
        LoraShape(rank=8, targets=("qv",))
    with pytest.raises(PlanError, match="rank: 0"):
        LoraShape(rank=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device_bytes": "24GB"}, "host_bytes is missing"),
        ({"host_bytes": "64GB"}, "device_bytes is missing"),
        ({"host_bytes": "64GB", "device_bytes": "24GB", "devices_per_host": 0}, "devices_per_host is 0"),
        ({"host_bytes": "64GB", "device_bytes": "24GB", "nvme_speed": 3}, "unknown nvme_speed"),
        ({"host_bytes": "64 apples", "device_bytes": "24GB"}, "host_bytes"),
        ({"host_bytes": -1, "device_bytes": "24GB"}, "host_bytes"),
        ({"host_bytes": "64GB", "device_bytes": "24GB", "link_bandwidth": 0}, "link_bandwidth is 0"),
    ],
)
def test_bad_machine_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        machine_from_mapping(values, source="machine.json")


@pytest.mark.parametrize(
    ("missing", "needs"),
    [
        ("nvme_read_bandwidth", "state on nvme"),
        ("nvme_write_bandwidth", "state on nvme"),
        ("link_bandwidth", "a transfer to the device"),
        ("half_flops", "step time"),
        ("host_bandwidth", "host memory"),
    ],
)
def test_machine_without_a_rate_says_which_and_for_what(missing: str, needs: str) -> None:
    machine = replace(machine_preset("rtx4090"), **{missing: None})
    with pytest.raises(PlanError, match=rf"{missing} is missing.*{needs}"):
        plan(Question(model=model_preset("gpt2"), load=Workload(), machine=machine))


def test_rates_of_tiers_that_are_not_there_need_not_be_known() -> None:
    machine = replace(machine_preset("cpu"), nvme_bytes=0, nvme_read_bandwidth=None, peer_bandwidth=None)
    answer = plan(Question(model=model_preset("gpt2"), load=Workload(), machine=machine))
    assert answer.best is not None
    assert all("nvme" not in item.label for item in answer.options)


def test_what_if_changes_scale_drives_and_replace_bytes() -> None:
    before = machine_preset("rtx4090")
    after = before.with_changes({"host": "256GB", "nvme": "2", "devices": 4})
    assert after.host_bytes == 256 * 10**9
    assert (after.drives, after.nvme_bytes) == (2, 2 * before.nvme_bytes)
    assert after.nvme_read_bandwidth == 2 * before.nvme_read_bandwidth
    assert after.devices_per_host == 4
    assert before.with_changes({"nvme": "4TB"}).nvme_bytes == 4 * 10**12
    assert before.with_changes({"nvme": "0"}).nvme_bytes == 0
    for changes, message in (({"nvme": "1.5"}, "whole number of drives"), ({"ram": 1}, "'ram' is unknown")):
        with pytest.raises(PlanError, match=message):
            before.with_changes(changes)


def test_this_machine_takes_the_container_limit_and_says_so() -> None:
    limits = MemoryLimits(
        total=64 << 30,
        available=60 << 30,
        cgroup=CgroupLimit(path="/sys/fs/cgroup/job", limit=512 << 20, used=12 << 20, reclaimable=4 << 20),
        address_space_free=None,
        lockable=None,
    )
    machine = this_machine(limits=limits)
    assert machine.host_bytes == (512 - 8) << 20
    assert "cgroup limit 536,870,912" in machine.notes[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("5e8", 5e8), ("1.5 TB", 1.5e12), (" 7 ", 7), ("3kb", 3000)],
)
def test_quantities(text: str, number: float) -> None:
    assert parse_number(text, what="x") == number


@pytest.mark.parametrize("text", ["", "GB", "12 furlongs", "-3", "1e999", "nan", True])
def test_bad_quantities_name_the_thing(text: str) -> None:
    with pytest.raises(PlanError, match="host"):
        parse_bytes(text, what="host")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (31_249_999_999, "31.2 GB"),
        (999_600_000, "1000 MB"),
        (-5e9, "-5 GB"),
    ],
)
def test_bytes_are_shown_with_three_digits(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_senseless_sizes_are_refused_before_they_are_planned(tmp_path: Path) -> None:
    bert = model_preset("bert-large")
    for change, message in (
        ({"lora": LoraShape(rank=99_999_999)}, r"lora rank 99,999,999 .*: 4,096 at most"),
        ({"layers": 100_000}, "layers is 100,000; no more than 10,000"),
        ({"vocab": 10**30}, "vocab is 1,000,.*; no more than 2,147,483,648"),
    ):
        with pytest.raises(PlanError, match=message):
            replace(bert, inventory=None, **change)
    with pytest.raises(PlanError, match="generations is 4; it must be at most 3"):
        Buffers(generations=4)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        read_model(str(tmp_path / "config.json"))
