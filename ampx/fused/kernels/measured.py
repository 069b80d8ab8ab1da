"""What was measured on a kind of GPU, and what follows from it for kernels.

`make gpu` times every fused optimizer by XLA and by kernels, and kernels with several settings.
What won there, by the rule in `benchmarks.gpu.adopting`, is kept in `measured.json` beside this
file, under the name that JAX has for the kind of device:

    {"NVIDIA H100 80GB HBM3": {"elements": 2048, "vector": 4, "leaves": 32, "work": ["norms"]}}

Of a kind that is not listed nothing is known. There kernels run with the settings that they were
written with, and only if they are asked for.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

from ampx.updates.devices import find_device
from ampx.updates.tails import DEFAULT_PLAN, Backend, KernelPlan

FILE = "measured.json"
_OF_PLATFORM: dict[str, Backend] = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def resolve_backend(backend: Backend) -> tuple[Backend, KernelPlan]:
    """What runs an update, "auto" and "pallas" made definite, and what kernels are to do.

    Raises:
      ValueError: for kernels on a platform that has none.
    """
    if backend == "xla" or (backend == "auto" and not _read()):
        return "xla", DEFAULT_PLAN  # devices are not asked: tracing alone needs none
    platform, kind = find_device()
    plan = plan_for(kind) if platform == "gpu" else None
    if backend == "auto":  # without a measurement, and where no kernel won, there is nothing to run
        return ("mosaic_gpu", plan) if plan and plan.work else ("xla", DEFAULT_PLAN)
    everything = (plan or DEFAULT_PLAN)._replace(work=None)
    if backend != "pallas":
        return backend, everything
    if platform not in _OF_PLATFORM:
        raise ValueError(
            f"backend='pallas' has kernels for GPUs and TPUs, and this is JAX on {platform!r}, "
            "where XLA runs updates: use 'auto'; in a test 'interpret', which is slow; and to "
            "lower for another platform 'mosaic_gpu' or 'mosaic_tpu'"
        )
    return _OF_PLATFORM[platform], everything


def plan_for(device_kind: str) -> KernelPlan | None:
    """What was measured to be best on a kind of device; None if nothing was measured there."""
    found = _read().get(device_kind)
    if found is None:
        return None
    own = {name: value for name, value in found.items() if name in KernelPlan._fields}
    return KernelPlan(**own | {"work": tuple(own["work"])})


@functools.cache
def _read() -> dict[str, dict[str, Any]]:
    return json.loads(importlib.resources.files("ampx.fused.kernels").joinpath(FILE).read_text())
