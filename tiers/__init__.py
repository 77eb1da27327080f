"""Where bytes live and when they move: arenas, the generation store, link models, the scheduler, the executor."""

from .arena import Arena, ArenaReport, Block
from .bandwidth import BandwidthModel, Curve, Link, Measured
from .errors import BudgetError, IntegrityError, LayoutError, LockedError, SpaceError, StoreError
from .executor import Executor
from .handle import TransferHandle
from .placement import Budgets, Home, Placement, PlacementError, SegmentSize, Wishes, place
from .plan import Action, Verb, format_plan, parse_plan
from .probe import DiskSpeed, probe_disk
from .residency import Residency
from .scheduler import Scheduler
from .spans import Spans
from .store import GenerationInfo, GenerationStore
from .tier import NvmePath, Plane, PlaneSpec, ShardSpec, Tier
from .trace import Access, TraceCursor
from .transaction import Transaction

__all__ = [
    "Access",
    "Action",
    "Arena",
    "ArenaReport",
    "BandwidthModel",
    "Block",
    "BudgetError",
    "Budgets",
    "Curve",
    "DiskSpeed",
    "Executor",
    "GenerationInfo",
    "GenerationStore",
    "Home",
    "IntegrityError",
    "LayoutError",
    "Link",
    "LockedError",
    "Measured",
    "NvmePath",
    "Placement",
    "PlacementError",
    "Plane",
    "PlaneSpec",
    "Residency",
    "Scheduler",
    "SegmentSize",
    "ShardSpec",
    "SpaceError",
    "Spans",
    "StoreError",
    "Tier",
    "TraceCursor",
    "Transaction",
    "TransferHandle",
    "Verb",
    "Wishes",
    "format_plan",
    "parse_plan",
    "place",
    "probe_disk",
]
