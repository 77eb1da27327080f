"""The block `aio`: how bytes go to and from NVMe."""

from __future__ import annotations

from pydantic import Field

from lamina.aio_native.async_io import MAX_BLOCK_BYTES, MAX_QUEUE_DEPTH, MAX_THREADS, PAGE
from lamina.engine.config.block import Block, hint
from lamina.engine.config.quantities import Bytes, PositiveCount


class AioConfig(Block):
    """Sizes of asynchronous I/O."""

    block_size: Bytes = Field(
        default=1 << 20, ge=PAGE, le=MAX_BLOCK_BYTES, multiple_of=PAGE, description="bytes of one request"
    )
    queue_depth: PositiveCount = Field(default=8, le=MAX_QUEUE_DEPTH, description="requests in flight")
    intra_op_parallelism: PositiveCount = Field(
        default=1, le=MAX_THREADS, description="threads of the threads backend; it has at least 8"
    )
    single_submit: bool = hint(False, "requests are always submitted in batches; the results are the same")
    overlap_events: bool = hint(True, "submission and completion always overlap; the results are the same")
    use_gds: bool = Field(default=False, description="GPUDirect storage; only false is supported")
