"""`lamina train` options: what is given wins over the config file, and that over the size's defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from lamina.bench.training.args import TrainingRun, parse
from lamina.engine.config import ConfigError, EngineConfig


def run_of(*arguments: str) -> TrainingRun:
    return parse(arguments)[1]


def config_file(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
@pytest.mark.parametrize("options", [(), ("--device-bytes", "96MiB", "--host-bytes", "1GB")])
def test_the_engine_accepts_the_config_of_every_size(size: str, options: tuple[str, ...], tmp_path: Path) -> None:
    run = run_of("--size", size, "--nvme-path", str(tmp_path), *options)
    for config in (run.engine_config(), run.in_memory_config()):
        effective = EngineConfig.load(config)
        assert effective.train_batch_size == run.batch * run.accum
        assert effective.gradient_clipping == 0
        assert effective.hints == ()


def test_budgets_are_bytes_and_leave_the_placement_to_the_planner(tmp_path: Path) -> None:
    run = run_of("--device-bytes", "96MiB", "--host-bytes", "1GB", "--nvme-path", str(tmp_path))
    config = EngineConfig.load(run.engine_config())
    assert (config.tiers.device_bytes, config.tiers.host_bytes) == (96 * 2**20, 10**9)
    assert set(config.placement().values()) == {"auto"}


def test_without_budgets_all_state_lies_on_nvme(tmp_path: Path) -> None:
    config = EngineConfig.load(run_of("--nvme-path", str(tmp_path)).engine_config())
    assert config.placement()["param"] == config.placement()["exp_avg"] == "nvme"
    assert [path.path for path in config.nvme_paths] == [str(tmp_path)]


def test_the_in_memory_config_has_no_trace_of_nvme_or_budgets(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"tiers": {"host_bytes": "2GB", "nvme": str(tmp_path), "verify": "always"}})
    config = EngineConfig.load(run_of("--config", file, "--device-bytes", "1GB").in_memory_config())
    assert config.nvme_paths == ()
    assert (config.tiers.device_bytes, config.tiers.host_bytes) == (None, None)
    assert config.tiers.verify == "always"
    assert "nvme" not in config.placement().values()


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = config_file(
        tmp_path,
        {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "weight_decay": 0.75}},
            "bf16": {"enabled": False},
        },
    )
    run = run_of("--config", file)
    assert (run.batch, run.accum, run.dtype) == (3, 2, "fp32")
    assert run.config["gradient_clipping"] == 0.5
    assert run.config["optimizer"]["params"] == {"lr": 0.25, "weight_decay": 0.75}
    run = run_of("--config", file, "--batch", "5", "--accum", "1", "--clip", "0", "--lr", "0.5", "--dtype", "bf16")
    assert (run.batch, run.accum, run.dtype) == (5, 1, "bf16")
    assert run.config["gradient_clipping"] == 0
    assert run.config["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.75}
    assert EngineConfig.load(run.engine_config()).compute_dtype == "bf16"


@pytest.mark.parametrize(
    ("file", "options", "batch", "accum"),
    [
        ({"train_batch_size": 12}, (), 12, 1),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, (), 4, 3),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": "auto"}, ("--accum", "2"), 6, 2),
        ({"train_batch_size": "12", "train_micro_batch_size_per_gpu": 4}, (), 4, 3),
        ({"train_batch_size": 12}, ("--batch", "2"), 2, 6),
        ({"train_batch_size": 12}, ("--batch", "5", "--accum", "7"), 5, 7),
    ],
)
def test_batch_sizes_are_derived_from_what_is_given(
    tmp_path: Path, file: dict[str, Any], options: tuple[str, ...], batch: int, accum: int
) -> None:
    run = run_of("--config", config_file(tmp_path, file), *options)
    assert (run.batch, run.accum) == (batch, accum)
    assert EngineConfig.load(run.engine_config()).train_batch_size == batch * accum


def test_a_batch_that_does_not_come_out_is_refused_by_the_engine(tmp_path: Path) -> None:
    run = run_of("--config", config_file(tmp_path, {"train_batch_size": 12, "gradient_accumulation_steps": 5}))
    with pytest.raises(ConfigError, match="12"):
        EngineConfig.load(run.engine_config())


def test_the_files_own_nvme_path_is_kept_unless_the_option_names_another(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"tiers": {"nvme": [{"path": str(tmp_path / "own")}]}})
    run = run_of("--config", file)
    assert run.nvme_path is None
    assert EngineConfig.load(run.engine_config()).nvme_paths[0].path == str(tmp_path / "own")
    run = run_of("--config", file, "--nvme-path", str(tmp_path / "other"))
    assert [path.path for path in EngineConfig.load(run.engine_config()).nvme_paths] == [str(tmp_path / "other")]


def test_a_relative_nvme_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_of().nvme_path == tmp_path / "lamina-nvme"
    assert run_of("--nvme-path", "a/../b c").nvme_path == tmp_path / "b c"


def test_the_shape_follows_the_options() -> None:
    shape = run_of("--size", "tiny", "--layers", "3", "--tied", "--seq", "48").shape
    assert (shape.layers, shape.dim, shape.seq, shape.tied) == (3, 256, 48, True)
    run = run_of("--layers", "2", "--dim", "96", "--heads", "3")
    assert (run.size, run.shape.layers, run.shape.dim, run.shape.heads) == ("custom", 2, 96, 3)
    assert run_of("--dim", "160").shape.heads == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "want a whole number from 1"),
        (("--batch", "two"), "want a whole number, got 'two'"),
        (("--host-bytes", "12 parsecs"), "--host-bytes"),
        (("--device-bytes", "0"), "want at least 1 byte"),
        (("--lr", "nan"), "--lr"),
        (("--lr", "-1"), "want a number of at least 0"),
        (("--size", "huge"), "invalid choice: 'huge'"),
        (("--tied", "--untied"), "not allowed with"),
        (("--step", "3"), "unrecognized arguments: --step"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json.*\n.*cannot be read"):
        run_of("--config", str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match=r"train_batch_size: .*truth value"):
        run_of("--config", config_file(tmp_path, {"train_batch_size": True}))
    with pytest.raises(ConfigError, match=r"tiers: want a block"):
        run_of("--config", config_file(tmp_path, {"tiers": 3}), "--host-bytes", "1GB")
    run = run_of("--config", config_file(tmp_path, {"gradient_cliping": 1}))
    with pytest.raises(ConfigError, match=r"gradient_cliping.*gradient_clipping"):
        EngineConfig.load(run.engine_config())
