"""Every key of the dialect in turn: typos, wrong types, "auto", disabled blocks, and what its row of the table says."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.engine.config import KEYS, ConfigError, EngineConfig, Key, Status

# Blocks that must hold something for the key under test to be read at all.
BASES: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "AdamW", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
}
SCHEDULE_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "total_num_steps": ("WarmupDecayLR", {"total_num_steps": 5000}),
    "warmup_min_ratio": ("WarmupCosineLR", {"total_num_steps": 5000}),
    "cos_min_ratio": ("WarmupCosineLR", {"total_num_steps": 5000}),
    "lr_range_test": ("LRRangeTest", {}),
    "cycle": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    "decay": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
}


def with_value(path: str, value: Any, *, meant: str | None = None) -> dict[str, Any]:
    """A config that is sound but for `value` at `path`, in the block that the key `meant` belongs to."""
    *blocks, name = path.split(".")
    top = blocks[0] if blocks else ""
    config: dict[str, Any] = {}
    if top in BASES:
        config[top] = {**BASES[top], "params": dict(BASES[top]["params"])}
        for start, (kind, params) in SCHEDULE_OF.items():
            if top == "scheduler" and (meant or path).rpartition(".")[2].startswith(start):
                config[top] = {"type": kind, "params": dict(params)}
    inner = config
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[name] = value
    return config


def problems(config: Any, **arguments: Any) -> dict[str, str]:
    try:
        EngineConfig.load(config, **arguments)
    except ConfigError as error:
        return dict(error.problems)
    return {}


LEAVES = [key.path for key in KEYS.values() if not key.is_block]
BLOCKS = [key.path for key in KEYS.values() if key.is_block]


def misspelt(path: str) -> str:
    """One letter in the middle of the last part doubled or, where that gives another key, changed."""
    head, _, name = path.rpartition(".")
    middle = len(name) // 2
    for wrong in (name[:middle] + name[middle] + name[middle:], name[:middle] + "q" + name[middle + 1 :]):
        candidate = f"{head}.{wrong}" if head else wrong
        if candidate not in KEYS:
            return candidate
    raise AssertionError(path)


def is_read(path: str) -> bool:
    """Whether typos beside `path` are looked for: not inside of a block that is refused as a whole."""
    parent = path.rpartition(".")[0]
    return KEYS[path].status is not Status.RENAMED and not (parent and KEYS[parent].status is Status.REFUSED)


@pytest.mark.parametrize("path", list(filter(is_read, KEYS)))
def test_e01_one_wrong_letter_is_an_error_with_path_and_nearest_key(path: str) -> None:
    wrong = misspelt(path)
    message = problems(with_value(wrong, 1, meant=path)).get(wrong)
    assert message is not None, f"{wrong} was accepted"
    assert "is not a known key" in message
    assert path in message, f"the nearest key is not named: {message}"


@pytest.mark.parametrize("path", LEAVES)
def test_e01_a_wrong_type_is_an_error_with_path_value_and_type(path: str) -> None:
    key = KEYS[path]
    if key.status is Status.RENAMED:
        path = key.instead
        key = KEYS[path]
    takes_blocks = dict in key.types or path == "tiers.placement"
    found = problems(with_value(path, ["wrong"] if takes_blocks else {"wrong": ["type"]}))
    message = " ".join(text for place, text in found.items() if place.startswith(path))
    if key.status is Status.REFUSED:
        assert "is not offered" in message
        return
    assert ("want" in message and "wrong" in message) or "is required" in message, found


@pytest.mark.parametrize("path", LEAVES)
def test_e03_auto_for_every_key_is_resolved_or_refused_by_name(path: str) -> None:
    found = problems(with_value(path, "auto"))
    if not found:
        config = EngineConfig.load(with_value(path, "auto"))
        values: Any = config.effective()
        for part in (KEYS[path].instead or path).split(".") if KEYS[path].status is Status.RENAMED else path.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        # Where "auto" is left over it is a value of its own.
        assert values != "auto" or path.startswith("tiers.")
    else:
        named = KEYS[path].instead if KEYS[path].status is Status.RENAMED else path
        assert list(found) == [named]
        assert "auto" in found[named]


def test_e03_keys_that_auto_cannot_decide() -> None:
    refused = {path for path in LEAVES if problems(with_value(path, "auto"))}
    assert refused >= {"optimizer.type", "scheduler.type", "scheduler.params.total_num_steps"}
    implemented = {path for path in refused if KEYS[path].status is Status.IMPLEMENTED}
    assert implemented == {
        "optimizer.type",
        "scheduler.type",
        "scheduler.params.total_num_steps",
        "scheduler.params.cycle_min_lr",
        "scheduler.params.cycle_max_lr",
    }


@pytest.mark.parametrize("path", [path for path in BLOCKS if not path.endswith(".params")])
def test_a_disabled_block_is_accepted(path: str) -> None:
    base = with_value(path, {"enabled": False})
    config = EngineConfig.load(base)
    assert config.compute_dtype == "fp32"
    if path.partition(".")[0] not in BASES:
        assert config.effective() == EngineConfig.load({}).effective()


@pytest.mark.parametrize(
    "key", [key for key in KEYS.values() if key.status is Status.REFUSED], ids=lambda key: key.path
)
def test_a_refused_key_says_why_and_what_to_write(key: Key) -> None:
    assert key.reason
    assert key.instead
    value: Any = {"anything": 1} if key.is_block else ["not", "neutral"]
    message = problems(with_value(key.path, value)).get(key.path)
    assert message is not None, f"{key.path} was accepted"
    assert key.reason in message
    assert f"write {key.instead} instead" in message
    for neutral in key.neutral:
        assert key.path not in problems(with_value(key.path, neutral)), neutral


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.status is Status.HINT], ids=lambda key: key.path)
def test_a_hint_is_listed_and_changes_nothing(key: Key) -> None:
    samples: dict[type, Any] = {bool: True, int: 3, float: 0.5, str: "text", list: [], dict: {}, type(None): None}
    block = {"enabled": True} if f"{key.path}.enabled" in KEYS else {}
    value: Any = samples[key.types[0]] if key.types else block if key.is_block else None
    if value is None:
        field = EngineConfig.load({}).effective()
        for part in key.path.split("."):
            field = field.get(part) if isinstance(field, dict) else None
        value = field if field is not None else 3 if key.path.endswith("number_checkpoints") else True
    config = EngineConfig.load(with_value(key.path, value))
    # A key inside a block that is a hint as a whole is covered by the block's line.
    named = [hint for hint in config.hints if key.path.startswith(hint.partition(":")[0])]
    assert named, config.hints
    assert all(key.reason in hint for hint in named)


def test_disabled_blocks_with_other_keys_ask_for_nothing() -> None:
    config = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "elasticity": {"enabled": False, "max_train_batch_size": 8},
    }
    assert EngineConfig.load(config).hints == ()


@pytest.mark.parametrize("path", [path for path in KEYS if KEYS[path].status is Status.RENAMED])
def test_an_old_spelling_is_read_and_told(path: str) -> None:
    new = KEYS[path].instead
    value: Any = {"enabled": True} if KEYS[new].is_block else EngineConfig.load(with_value(new, "auto")).effective()
    for part in new.split(".") if not KEYS[new].is_block else ():
        value = value.get(part, False) if isinstance(value, dict) else value
    if int in KEYS[new].types:
        value = 7
    config = EngineConfig.load(with_value(path, value))
    assert any(hint.startswith(f"{path}: is read as {new}") for hint in config.hints)
    both = with_value(new, value)
    block = both
    for part in path.split(".")[:-1]:
        block = block[part]
    block[path.rpartition(".")[2]] = value
    assert "keep one" in problems(both)[path]


def test_the_table_is_complete_and_prints() -> None:
    assert len(KEYS) > 200
    by_status = {status: [key for key in KEYS.values() if key.status is status] for status in Status}
    assert all(by_status.values())
    for key in KEYS.values():
        assert key.reason or key.status is Status.RENAMED, key.path
        assert str(key).startswith(f"{key.path}: {key.status}")
        parent = key.path.rpartition(".")[0]
        assert not parent or parent in KEYS, f"{key.path} has no block"
