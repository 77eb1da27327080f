"""Groups that are used at the same time: the planner counts them as the engine does, of a module and of a config."""

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_configs import CONFIGS
from safetensors.numpy import save_file

from lamina.engine import initialize
from lamina.engine.planner import (
    Buffers,
    ModelShape,
    Placement,
    Question,
    Workload,
    emit_config,
    model_preset,
    read_model,
    shape_from_module,
    this_machine,
)
from lamina.engine.planner.hf_config import shape_from_config
from lamina.engine.planner.options import option
from lamina.engine.planner.rank_slice import rank_slice
from lamina.tiers import PlacementError

SPLIT = Placement(stage=3)
VOCABULARY = 40_000
"""So many rows that the table of tokens is a group of its own."""


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        import transformers

        yield transformers


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_config_forms_the_groups_of_the_module_that_it_builds(kind: str, tied: bool, transformers: Any) -> None:
    values = {"model_type": kind, **CONFIGS[kind], "vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(**values)
    family = {"bert": transformers.AutoModel, "t5": transformers.AutoModelForSeq2SeqLM}
    with torch.device("meta"):
        module = family.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    found = rank_slice(shape_from_config(values, name=kind), SPLIT, 1)
    formed = rank_slice(shape_from_module(module, name=kind), SPLIT, 1)
    if kind == "t5":  # one of the two last norms lies between the blocks, and joins another one of them
        assert found.groups == pytest.approx(formed.groups, abs=2 * 32)
        assert (found.numel, found.together) == (formed.numel, formed.together)
    else:
        assert found == formed
    assert found.together == (((0, 1),) if kind == "phi" and tied else ())


WIDTHS = {"vocab_size": 18_000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
MASKED = {**WIDTHS, "intermediate_size": 128, "max_position_embeddings": 40}
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertForMaskedLM", MASKED),
    "albert": ("albert", "AlbertForMaskedLM", {**MASKED, "embedding_size": 60}),
    "phi": ("phi", "PhiForCausalLM", {**MASKED, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 18_000, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2},
    ),
}
"""Families with a tied table; of all but the last the output matrix has a bias."""


def planned(model: ModelShape, folder: Path) -> dict[str, Any]:
    rates = {"half_flops": 1e11, "fp32_flops": 1e11, "host_bandwidth": 1e10}
    rates |= {"nvme_read_bandwidth": 1e9, "nvme_write_bandwidth": 1e9}
    machine = replace(this_machine(rates=rates, nvme_path=folder), device_bytes=0)
    load = Workload(sequence=32, dtype="fp32", checkpoint_interval=0, barrier=False)
    question = Question(model=model, load=load, machine=machine, buffers=Buffers(lookahead=0))
    return emit_config(option(question, Placement(stage=3, param="nvme", optimizer="nvme")), nvme_path=str(folder))


@pytest.mark.parametrize("family", HEADS)
def test_tied_models_run_at_the_planned_budget_and_are_refused_below(
    family: str, transformers: Any, tmp_path: Path
) -> None:
    kind, name, values = HEADS[family]
    made = transformers.AutoConfig.for_model(kind, **values, decoder_start_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps({**made.to_dict(), "architectures": [name]}))
    config = planned(read_model(str(tmp_path)), tmp_path / "nvme")
    with torch.device("meta"):
        on_meta = getattr(transformers, name)(made)
    of_module = planned(shape_from_module(on_meta, name=family), tmp_path / "nvme")
    assert of_module["tiers"]["device_bytes"] == config["tiers"]["device_bytes"]
    tokens = torch.randint(2, 18_000, (1, 32))
    with initialize(getattr(transformers, name)(made), config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        assert engine.metrics().peak_bytes["device"] <= config["tiers"]["device_bytes"]
    less = config["tiers"]["device_bytes"] * 96 // 100
    short = {**config, "tiers": {**config["tiers"], "device_bytes": less}}
    with pytest.raises(PlacementError) as refused:
        initialize(getattr(transformers, name)(made), config=short)
    told = re.search(rf"device_bytes is {less:,}, but at least ([\d,]+) are needed", str(refused.value))
    assert told is not None
    assert int(told[1].replace(",", "")) == pytest.approx(config["tiers"]["device_bytes"], rel=0.04)


def test_a_file_without_the_tied_matrix_tells_of_its_bias(transformers: Any, tmp_path: Path) -> None:
    kind, name, values = HEADS["bert"]
    made = transformers.AutoConfig.for_model(kind, **values)
    model = getattr(transformers, name)(made)
    save_file({key: tensor.detach().numpy() for key, tensor in model.named_parameters()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**made.to_dict(), "architectures": [name]}))
    part = rank_slice(read_model(str(tmp_path / "m.safetensors")), SPLIT, 1)
    assert part.together == ((0, 1),)
    assert part.groups[:2] == rank_slice(shape_from_module(model, name=name), SPLIT, 1).groups[:2]


def test_a_block_that_is_used_several_times_is_held_once_and_computed_as_often(transformers: Any) -> None:
    kind, name, values = HEADS["albert"]
    with torch.device("meta"):
        module = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **values))
    shape = shape_from_module(module, name=name)
    block = sum(parameter.numel() for parameter in module.albert.encoder.albert_layer_groups.parameters())
    assert shape.params.blocks == (block,)
    assert shape.active_params == shape.total_params + 2 * block
    assert rank_slice(shape, SPLIT, 1).layers == 3


def test_frozen_parameters_are_counted_in_their_own_groups() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)), torch.nn.Embedding(512, 256))
    table = torch.nn.ModuleDict({"embed": module[3], "blocks": module[:3]})
    table["blocks"][1].requires_grad_(False)  # type: ignore[index]
    part = rank_slice(shape_from_module(table, name="m", heads=4), SPLIT, 1)
    assert part.trainable_blocks == (256 * 257, 0, 256 * 257)


def test_presets_with_a_plain_head_use_no_groups_together() -> None:
    assert rank_slice(model_preset("gpt2"), SPLIT, 1).together == ()
