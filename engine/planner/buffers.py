"""Sizes of windows, buckets and staging buffers: what users may set."""

from dataclasses import dataclass

from lamina.engine.planner.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Settings that cost memory; the defaults are the engine's own."""

    lookahead: int = 2
    """Groups fetched ahead of the one in use."""
    max_live: int | None = None
    """Elements gathered at once at most (stage3_max_live_parameters); a group that is in use is always whole.

    With None the window is the group in use and ``lookahead`` more.
    """
    reduce_bucket: int | None = None
    """Elements of one reduction bucket (reduce_bucket_size); None reduces whole groups in place."""
    bucket_count: int = 2
    """Buckets that exist at once: one fills while the other is reduced."""
    sub_group: int = 1 << 22
    """Elements that the optimizer streams at a time."""
    update_depth: int = 3
    """Sub-groups in flight: one read, one updated, one written."""
    generations: int = 2
    """Versions of the state on nvme."""
    checkpoints_kept: int = 0
    """Checkpoints that pin a generation of their own on the state's drives."""
    half_gradients_kept: bool = False
    """Whole compute-dtype gradients stay on the device beside the fp32 sums, as plain data parallelism
    does."""
    zero_init: bool = True
    """The model is built inside of ``zero.Init``: never whole in one process."""
    io_staging_bytes: int = 64 << 20
    """Pinned memory for checkpoints: saved and loaded in pieces of this size."""

    def __post_init__(self) -> None:
        least = {"lookahead": 0, "bucket_count": 1, "sub_group": 1, "update_depth": 1, "generations": 1}
        for name, limit in {**least, "checkpoints_kept": 0, "io_staging_bytes": 0}.items():
            if getattr(self, name) < limit:
                raise PlanError(f"buffers: {name} is {getattr(self, name)}; it must be at least {limit}")
        if self.generations > 3:
            raise PlanError(f"buffers: generations is {self.generations}; it must be at most 3")
        for name in ("max_live", "reduce_bucket"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PlanError(f"buffers: {name} is {value}; it must not be negative")
