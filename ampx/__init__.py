"""ampx: functional training transforms for JAX and Flax."""

from ampx import fused, pipelining
from ampx.accumulation import GradResult, split_microbatches, value_and_grad
from ampx.annealing import follow_schedule
from ampx.autocasting.marks import (
    banned_function,
    cast,
    float_function,
    half_function,
    promote_function,
)
from ampx.autocasting.report import Explanation, explain
from ampx.autocasting.rules import DEFAULT_RULES, Rules
from ampx.autocasting.transform import autocast
from ampx.backward_reduction import reduce_in_backward
from ampx.bucket_clipping import clip_by_bucket_norm
from ampx.bucket_timelines import BucketTimeline, bucket_timeline
from ampx.buckets import Bucket, BucketLayout, bucket_layout
from ampx.loss_scale_state import (
    LossScaleState,
    current_loss_scale,
    find_loss_scale_state,
    is_skipped,
    raise_if_exhausted,
    select_if_finite,
)
from ampx.loss_scaling import (
    dynamic_loss_scale,
    loss_scale,
    no_loss_scale,
    static_loss_scale,
)
from ampx.masters import MasterWeightsState, master_params, master_weights
from ampx.monitoring import metrics, progress_bar
from ampx.numerics import NumericsReport, NumericsRow, numerics_report
from ampx.opt_levels import Recipe, as_recipe, opt_level
from ampx.overflows import OverflowRecord, OverflowReport
from ampx.overlap import OverlapReport, check_overlap, forward_order
from ampx.precision import Policy, cast_floating, get_policy, is_norm_path, norm_rule
from ampx.precision_phases import PrecisionScheduleState, precision_phase
from ampx.precision_schedules import Phase, PrecisionSchedule, precision_schedule
from ampx.reduction import ReductionState, all_reduce
from ampx.sharding import Zero1State, zero1, zero1_specs
from ampx.sparse_rows import SparseRows, densify, densify_rows
from ampx.step_reports import StepReport
from ampx.stored_params import apply_updates
from ampx.tracing import trace_overflow
from ampx.train_states import TrainState
from ampx.training import TrainStep, train_step
from ampx.verdicts import count_nonfinite
from ampx.windowing import MultiStepsState, multi_steps

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketLayout",
    "BucketTimeline",
    "DEFAULT_RULES",
    "Explanation",
    "GradResult",
    "LossScaleState",
    "MasterWeightsState",
    "MultiStepsState",
    "NumericsReport",
    "NumericsRow",
    "OverflowRecord",
    "OverflowReport",
    "OverlapReport",
    "Phase",
    "Policy",
    "PrecisionSchedule",
    "PrecisionScheduleState",
    "Recipe",
    "ReductionState",
    "Rules",
    "SparseRows",
    "StepReport",
    "TrainState",
    "TrainStep",
    "Zero1State",
    "all_reduce",
    "apply_updates",
    "as_recipe",
    "autocast",
    "banned_function",
    "bucket_layout",
    "bucket_timeline",
    "cast",
    "cast_floating",
    "check_overlap",
    "clip_by_bucket_norm",
    "count_nonfinite",
    "current_loss_scale",
    "densify",
    "densify_rows",
    "dynamic_loss_scale",
    "explain",
    "find_loss_scale_state",
    "float_function",
    "follow_schedule",
    "forward_order",
    "fused",
    "get_policy",
    "half_function",
    "is_norm_path",
    "is_skipped",
    "loss_scale",
    "master_params",
    "master_weights",
    "metrics",
    "multi_steps",
    "no_loss_scale",
    "norm_rule",
    "numerics_report",
    "opt_level",
    "pipelining",
    "precision_phase",
    "precision_schedule",
    "progress_bar",
    "promote_function",
    "raise_if_exhausted",
    "reduce_in_backward",
    "select_if_finite",
    "split_microbatches",
    "static_loss_scale",
    "trace_overflow",
    "train_step",
    "value_and_grad",
    "zero1",
    "zero1_specs",
]
