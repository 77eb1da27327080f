"""Writers of figures: CSV files, JSON lines and TensorBoard events, one record a step, from rank 0."""

import csv
import importlib
import json
import math
import os
from collections.abc import Sequence
from typing import IO, Any, Protocol

from .config import ConfigError, EngineConfig
from .metrics import StepMetrics

# DeepSpeed's names of the three figures that its monitors write, each against the samples seen so far.
LOSS, RATE, SCALE = "Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"


class Monitor(Protocol):
    """Takes every step's metrics. ``samples``: of all ranks, since the start of training."""

    def write(self, metrics: StepMetrics, samples: int) -> None:
        """Raises OSError when the figures cannot be written."""

    def close(self) -> None:
        """Write what is buffered; harmless when repeated."""


def figures(metrics: StepMetrics) -> dict[str, float]:
    """What CSV and TensorBoard get: DeepSpeed's three, and the step's own."""
    found = {RATE: metrics.lr, SCALE: metrics.loss_scale}
    if metrics.loss is not None:
        found[LOSS] = metrics.loss
    own = {
        "step_s": metrics.step_s,
        "grad_norm": metrics.grad_norm,
        "communication_share": metrics.communication_share,
        "stalled_share": metrics.stalled_share,
        "lower_bound_ratio": metrics.lower_bound_ratio,
        **{f"peak_bytes/{tier}": float(value) for tier, value in metrics.peak_bytes.items()},
    }
    return found | {f"Train/Step/{name}": value for name, value in own.items()}


class CsvMonitor:
    """One file per figure with the columns step (samples) and figure, appended to."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self._files: dict[str, IO[str]] = {}

    def write(self, metrics: StepMetrics, samples: int) -> None:
        for name, value in figures(metrics).items():
            file = self._files.get(name)
            if file is None:
                path = os.path.join(self.folder, name.replace("/", "_") + ".csv")
                file = self._files[name] = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - closed below
                if file.tell() == 0:
                    csv.writer(file).writerow(["step", name.rpartition("/")[2]])
            csv.writer(file).writerow([samples, value])
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class JsonMonitor:
    """All metrics of a step as one line of JSON in metrics.jsonl, appended to."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._file = open(os.path.join(folder, "metrics.jsonl"), "a", encoding="utf-8")  # noqa: SIM115 - closed below

    def write(self, metrics: StepMetrics, samples: int) -> None:
        record = {"samples": samples, **metrics.as_dict()}
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardMonitor:
    """Event files for TensorBoard; needs its package."""

    def __init__(self, folder: str) -> None:
        # Loaded here: the package is optional, and importing it takes a second.
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def write(self, metrics: StepMetrics, samples: int) -> None:
        for name, value in figures(metrics).items():
            self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        self._writer.close()


class Monitors:
    """All writers that a config asks for. Falsy when there are none."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def __bool__(self) -> bool:
        return bool(self._monitors)

    def write(self, metrics: StepMetrics, samples: int) -> None:
        for monitor in self._monitors:
            monitor.write(metrics, samples)

    def close(self) -> None:
        while self._monitors:
            self._monitors.pop().close()


def open_monitors(config: EngineConfig, *, rank: int) -> Monitors:
    """The writers of a config; none on other ranks than 0.

    Raises ConfigError, all at once, for a folder that cannot be written and for TensorBoard without its package.
    """
    kinds: list[tuple[str, Any, Any]] = [
        ("csv_monitor", config.csv_monitor, CsvMonitor),
        ("json_monitor", config.json_monitor, JsonMonitor),
        ("tensorboard", config.tensorboard, TensorBoardMonitor),
    ]
    opened: list[Monitor] = []
    problems: list[tuple[str, str]] = []
    for key, block, kind in kinds:
        if not block.enabled or rank != 0:
            continue
        folder = os.path.abspath(os.path.join(os.path.expanduser(block.output_path), block.job_name))
        try:
            opened.append(kind(folder))
        except ImportError as error:
            problems.append((f"{key}.enabled", f"is true, but {error.name or 'its package'} is not installed"))
        except OSError as error:
            problems.append((f"{key}.output_path", f"{folder} cannot be written: {error.strerror}"))
    if problems:
        Monitors(opened).close()
        raise ConfigError(problems)
    return Monitors(opened)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return value
