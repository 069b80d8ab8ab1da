"""ampx: functional training transforms for JAX and Flax."""

from ampx import fused, pipelining
from ampx.accumulation.gradients import value_and_grad
from ampx.accumulation.microbatches import split_microbatches
from ampx.accumulation.multi_steps import MultiStepsState, multi_steps
from ampx.accumulation.results import GradResult
from ampx.accumulation.sparse_rows import SparseRows, densify, densify_rows
from ampx.autocasting.float8 import Float8
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
from ampx.data_parallel.all_reduce import all_reduce
from ampx.data_parallel.backward_reduction import reduce_in_backward
from ampx.data_parallel.bucket_clipping import clip_by_bucket_norm
from ampx.data_parallel.forward_order import forward_order
from ampx.data_parallel.gradient_shards import GradientShard
from ampx.data_parallel.reduction_states import ReductionState
from ampx.data_parallel.zero1 import Zero1State, zero1
from ampx.data_parallel.zero1_specs import zero1_specs
from ampx.diagnostics.bucket_timelines import BucketTimeline, bucket_timeline
from ampx.diagnostics.float8_shares import Float8Row, Float8Shares
from ampx.diagnostics.lint import LintReport, lint_step
from ampx.diagnostics.lint_findings import LintFinding
from ampx.diagnostics.numerics import numerics_report
from ampx.diagnostics.numerics_reports import NumericsReport, NumericsRow
from ampx.diagnostics.overflow_reports import OverflowRecord, OverflowReport
from ampx.diagnostics.overflow_tracing import trace_overflow
from ampx.diagnostics.overlap import OverlapReport, check_overlap
from ampx.diagnostics.recommendations import Recommendation
from ampx.flat_buffers.buckets import Bucket, BucketLayout, bucket_layout
from ampx.loss_scaling.nonfinite import count_nonfinite
from ampx.loss_scaling.state import (
    LossScaleState,
    current_loss_scale,
    find_loss_scale_state,
    is_skipped,
    raise_if_exhausted,
    select_if_finite,
)
from ampx.loss_scaling.wrappers import (
    dynamic_loss_scale,
    loss_scale,
    no_loss_scale,
    static_loss_scale,
)
from ampx.namesake import warn_of_namesake as _warn_of_namesake
from ampx.param_storage.master_weights import MasterWeightsState, master_params, master_weights
from ampx.precision.follow_schedule import PrecisionScheduleState, follow_schedule, precision_phase
from ampx.precision.opt_levels import Recipe, opt_level
from ampx.precision.policies import Policy, cast_floating, get_policy, is_norm_path, norm_rule
from ampx.precision.precision_schedules import Phase, PrecisionSchedule, precision_schedule
from ampx.precision.recipe_names import as_recipe
from ampx.training.added_params import extend_state
from ampx.training.deepspeed_config import read_deepspeed_config
from ampx.training.monitoring import metrics, progress_bar
from ampx.training.state_formats import check_state_format, state_format, upgrade_state
from ampx.training.step_execution import TrainStep
from ampx.training.step_reports import StepReport
from ampx.training.train_states import TrainState
from ampx.training.train_step import train_step
from ampx.updates.applying import apply_updates

__version__ = "0.1.0"

_warn_of_namesake()

__all__ = [
    "Bucket",
    "BucketLayout",
    "BucketTimeline",
    "DEFAULT_RULES",
    "Explanation",
    "Float8",
    "Float8Row",
    "Float8Shares",
    "GradResult",
    "GradientShard",
    "LintFinding",
    "LintReport",
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
    "Recommendation",
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
    "check_state_format",
    "clip_by_bucket_norm",
    "count_nonfinite",
    "current_loss_scale",
    "densify",
    "densify_rows",
    "dynamic_loss_scale",
    "explain",
    "extend_state",
    "find_loss_scale_state",
    "float_function",
    "follow_schedule",
    "forward_order",
    "fused",
    "get_policy",
    "half_function",
    "is_norm_path",
    "is_skipped",
    "lint_step",
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
    "read_deepspeed_config",
    "reduce_in_backward",
    "select_if_finite",
    "split_microbatches",
    "state_format",
    "static_loss_scale",
    "trace_overflow",
    "train_step",
    "upgrade_state",
    "value_and_grad",
    "zero1",
    "zero1_specs",
]


def __dir__() -> list[str]:
    """What completion offers: public names, and not the modules that they come from."""
    return [*__all__, *({"plotting"} & globals().keys())]  # if it has been imported
