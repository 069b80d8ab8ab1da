"""What would a step of a large model need, on 512 devices that nobody here has?

A transformer of 24 layers of width 12288, with 96 heads, a feed-forward of 49152 and 2048 tokens a
row, on a mesh of 16 x 32 devices: 16 divide each layer (tensor parallelism, by hand), and 32 are 8
stages of 3 layers each, 4 times. (24 layers do not divide over 32 stages.) Run
`python -m benchmarks.large_plan`: nothing is computed, and the report takes less than a minute.
"""

import optax

from ampx import pipelining
from benchmarks.published_plans import RUNS, make_model


def main() -> None:
    """Prints the plan."""
    *model, mesh = make_model(RUNS[0]._replace(vocabulary=51200))
    print(pipelining.plan(*model, optax.adamw(1e-4), mesh=mesh))


if __name__ == "__main__":
    main()
