"""Pipeline parallelism: schedules as data, and one compiled program that runs them.

Examples:
  >>> import ampx
  >>> schedule = ampx.pipelining.one_f_one_b(num_stages=2, num_microbatches=4)
  >>> print(f"{schedule.simulate(forward=1, backward=2).bubble_fraction:.2f}")
  0.20
"""

from ampx.pipelining.gradients import value_and_grad
from ampx.pipelining.layer_stacks import stack_layers, unstack_layers
from ampx.pipelining.planning.balancing import balance, layer_costs
from ampx.pipelining.planning.plans import Plan, plan
from ampx.pipelining.schedules.actions import Action
from ampx.pipelining.schedules.generators import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    looped_breadth_first,
    make_schedule,
    one_f_one_b,
)
from ampx.pipelining.schedules.liveness import Liveness
from ampx.pipelining.schedules.schedule import Schedule
from ampx.pipelining.schedules.simulation import Simulation
from ampx.pipelining.schedules.zero_bubbles import (
    dualpipe_v,
    interleaved_zero_bubble,
    zero_bubble,
    zero_bubble_v,
)
from ampx.pipelining.shard_map_program import PipelineGradients

__all__ = [
    "Action",
    "Liveness",
    "PipelineGradients",
    "Plan",
    "Schedule",
    "Simulation",
    "balance",
    "dualpipe_v",
    "eager_one_f_one_b",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "layer_costs",
    "looped_breadth_first",
    "make_schedule",
    "one_f_one_b",
    "plan",
    "stack_layers",
    "unstack_layers",
    "value_and_grad",
    "zero_bubble",
    "zero_bubble_v",
]


def __dir__() -> list[str]:
    """What completion offers: public names, and not the modules that they come from."""
    return __all__
