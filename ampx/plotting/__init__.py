"""Pictures: of training, of pipeline schedules, of magnitudes of values, of buckets of gradients.

matplotlib is imported when a picture is drawn, so that ampx itself does without it.
"""

from ampx.pipelining.schedules.schedule_plots import plot_schedule
from ampx.plotting.bucket_plots import plot_buckets
from ampx.plotting.exponent_plots import plot_exponents
from ampx.plotting.training_plots import plot_training

__all__ = ["plot_buckets", "plot_exponents", "plot_schedule", "plot_training"]


def __dir__() -> list[str]:
    """What completion offers: public names, and not the modules that they come from."""
    return __all__
