"""Where bytes live and when they move: arenas, the generation store, link models, the scheduler, the executor."""

from .arena import Arena, ArenaReport, Block
from .bandwidth import BandwidthModel, Curve, Link, Measured
from .choice import Choice, choose
from .errors import BudgetError, IntegrityError, LayoutError, LockedError, SpaceError, StoreError
from .executor import Executor
from .explanation import Explanation, explain
from .homes import Budgets, Home, SegmentSize, Wishes
from .nvme.handle import TransferHandle
from .nvme.store import GenerationInfo, GenerationStore
from .nvme.taken_sums import TakenSums
from .nvme.transaction import Transaction
from .order import Claim, Order
from .placement import Placement, PlacementError
from .placer import place
from .plan import Action, Verb, format_plan, parse_plan
from .probe import DiskSpeed, probe_disk, probe_mix
from .question import PlacementQuestion
from .replan import Replanner, Revision
from .residency import Residency
from .scheduler import Scheduler
from .simulate import Simulation, simulate, simulate_ranks
from .spans import Spans
from .step_model import ComputeTimes, GroupModel, StepModel, SubGroup, UpdateModel, model_step
from .tier import NvmePath, Plane, PlaneSpec, ShardSpec, Tier
from .trace import Access, TraceCursor

__all__ = [
    "Access",
    "Action",
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
