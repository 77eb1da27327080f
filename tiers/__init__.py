"""Where bytes live and when they move: arenas, the generation store, link models, the scheduler, the executor."""

from .errors import BudgetError, IntegrityError, LayoutError, LockedError, SpaceError, StoreError
from .links.bandwidth import BandwidthModel, Curve, Link
from .links.correction import Alone, Measured
from .links.probe import DiskSpeed, probe_disk, probe_mix
from .memory.arena import Arena, ArenaReport, Block
from .nvme.generation_info import GenerationInfo
from .nvme.handle import TransferHandle
from .nvme.store import GenerationStore
from .nvme.taken_sums import TakenSums
from .nvme.transaction import Transaction
from .placement.choice import Choice, choose
from .placement.explanation import Explanation, explain
from .placement.homes import Budgets, Home, SegmentSize, Wishes
from .placement.order import Claim, Order
from .placement.placement import Placement, PlacementError
from .placement.placer import place
from .placement.question import PlacementQuestion
from .placement.replan import Replanner, Revision
from .schedule.executor import Executor
from .schedule.plan import Action, Verb, format_plan, parse_plan
from .schedule.residency import Residency
from .schedule.scheduler import Scheduler
from .schedule.spans import Spans
from .schedule.trace import Access, TraceCursor
from .simulation.simulate import Simulation, simulate, simulate_ranks
from .simulation.step_model import ComputeTimes, GroupModel, StepModel, SubGroup, UpdateModel, model_step
from .tier import NvmePath, Plane, PlaneSpec, ShardSpec, Tier

__all__ = [
    "Access",
    "Action",
    "Alone",
    "Arena",
    "ArenaReport",
    "BandwidthModel",
    "Block",
    "BudgetError",
    "Budgets",
    "Choice",
    "Claim",
    "ComputeTimes",
    "Curve",
    "DiskSpeed",
    "Executor",
    "Explanation",
    "GenerationInfo",
    "GenerationStore",
    "GroupModel",
    "Home",
    "IntegrityError",
    "LayoutError",
    "Link",
    "LockedError",
    "Measured",
    "NvmePath",
    "Order",
    "Placement",
    "PlacementError",
    "PlacementQuestion",
    "Plane",
    "PlaneSpec",
    "Replanner",
    "Residency",
    "Revision",
    "Scheduler",
    "SegmentSize",
    "ShardSpec",
    "Simulation",
    "SpaceError",
    "Spans",
    "StepModel",
    "StoreError",
    "SubGroup",
    "TakenSums",
    "Tier",
    "TraceCursor",
    "Transaction",
    "TransferHandle",
    "UpdateModel",
    "Verb",
    "Wishes",
    "choose",
    "explain",
    "format_plan",
    "model_step",
    "parse_plan",
    "place",
    "probe_disk",
    "probe_mix",
    "simulate",
    "simulate_ranks",
]
