"""The capacity planner: what fits where, how fast, and what to change. Pure: no torch, no clock.

Start with ``plan(Question(model=…, load=…, machine=…))``.
"""

from lamina.engine.planner.buffers import Buffers
from lamina.engine.planner.case import Case
from lamina.engine.planner.emit_config import emit_config
from lamina.engine.planner.errors import PlanError
from lamina.engine.planner.fit import Fit, fit
from lamina.engine.planner.footprint import Footprint, footprint
from lamina.engine.planner.items import Kind, Phase
from lamina.engine.planner.machine import Machine, machine_from_mapping
from lamina.engine.planner.machine_presets import MACHINE_PRESETS, machine_preset
from lamina.engine.planner.model_input import read_model
from lamina.engine.planner.model_presets import MODEL_PRESETS, model_preset
from lamina.engine.planner.model_shape import LoraShape, ModelShape, ParamInventory
from lamina.engine.planner.module_shape import shape_from_module
from lamina.engine.planner.options import Option, Plan, Question, plan
from lamina.engine.planner.placement import Placement, all_placements
from lamina.engine.planner.plain_data import plan_data
from lamina.engine.planner.step_time import StepTime, step_time
from lamina.engine.planner.this_machine import this_machine
from lamina.engine.planner.wear import Wear, drive_wear
from lamina.engine.planner.workload import Workload

__all__ = [
    "MACHINE_PRESETS",
    "MODEL_PRESETS",
    "Buffers",
    "Case",
    "Fit",
    "Footprint",
    "Kind",
    "LoraShape",
    "Machine",
    "ModelShape",
    "Option",
    "ParamInventory",
    "Phase",
    "Placement",
    "Plan",
    "PlanError",
    "Question",
    "StepTime",
    "Wear",
    "Workload",
    "all_placements",
    "drive_wear",
    "emit_config",
    "fit",
    "footprint",
    "machine_from_mapping",
    "machine_preset",
    "model_preset",
    "plan",
    "plan_data",
    "read_model",
    "shape_from_module",
    "step_time",
    "this_machine",
]
