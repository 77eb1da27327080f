"""Blocks that write figures down: `tensorboard`, `csv_monitor` and our own `json_monitor`."""

from __future__ import annotations

from pydantic import Field

from lamina.engine.config.block import Block


class TensorBoardConfig(Block):
    """Write metrics for TensorBoard."""

    enabled: bool = Field(default=False, description="write event files; needs the tensorboard package")
    output_path: str = Field(default="", description="folder; empty: the working directory")
    job_name: str = Field(default="lamina", description="sub-folder")


class CsvMonitorConfig(Block):
    """Write metrics as CSV files."""

    enabled: bool = Field(default=False, description="write CSV files")
    output_path: str = Field(default="", description="folder; empty: the working directory")
    job_name: str = Field(default="lamina", description="sub-folder")


class JsonMonitorConfig(Block):
    """Write every step's metrics as one JSON object a line."""

    enabled: bool = Field(default=False, description="write metrics.jsonl")
    output_path: str = Field(default="", description="folder; empty: the working directory")
    job_name: str = Field(default="lamina", description="sub-folder")
