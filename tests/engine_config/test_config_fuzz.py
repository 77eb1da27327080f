"""Whatever a config holds, it is loaded or refused with problems; nothing else is ever raised."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.engine.config import KEYS, ConfigError, EngineConfig
from lamina.engine.config.source import scan_text

SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.floats(),
    st.sampled_from(["auto", "nvme", "cpu", "fp32", "", "2GB", "Adam", "WarmupLR", "OneCycle", "SGD", "a/b"]),
    st.text(max_size=5),
)
JSON = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(["enabled", "type", "params", "path", "param"]), st.text(max_size=4)), inner
        ),
    ),
    max_leaves=6,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Known keys with any values, some of them blocks where scalars belong and the other way round."""
    config: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=8)):
        *blocks, name = path.split(".")
        inner: Any = config
        for block in blocks:
            inner = inner.setdefault(block, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[name] = draw(JSON)
    return config


@settings(max_examples=100, deadline=None)
@given(
    config=configs(), world=st.integers(1, 3), facts=st.dictionaries(st.sampled_from(sorted(KEYS)), JSON, max_size=2)
)
def test_any_config_is_loaded_or_refused(config: dict[str, Any], world: int, facts: dict[str, Any]) -> None:
    try:
        loaded = EngineConfig.load(config, world_size=world, resolve=facts)
    except ConfigError as error:
        for path, message in error.problems:
            assert message, path
            root = path.partition(".")[0].partition("[")[0]
            assert root in config or root in ("resolve", "train_batch_size", "bf16")
        return
    effective = json.loads(json.dumps(loaded.effective()))
    assert EngineConfig.load(effective, world_size=world).effective() == effective
    assert str(loaded)


def holds_an_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet='{}[]":,ab1.e-+ \n', max_size=25))
def test_any_text_is_json_or_refused(text: str) -> None:
    try:
        scanned = scan_text(text)
    except ConfigError:
        assert not holds_an_object(text)
    else:
        wanted = json.loads(text)
        assert scanned.given == wanted
        keys = len(json.loads(text, object_pairs_hook=lambda pairs: pairs))
        assert bool(scanned.problems) >= (keys != len(wanted))
