"""For which device a program is traced, and what follows from it for how updates are arranged.

A device is asked for its kind alone, and nothing depends on the answer but speed: a program that
was traced for one kind and runs on another computes the same.
"""

from __future__ import annotations

from typing import Any

import jax


def find_device() -> tuple[str, str]:
    """Platform and kind of the device for programs without one: `jax.default_device`, or else 0."""
    device: Any = getattr(jax.config, "jax_default_device")  # noqa: B009, which no stub has
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is not None:
        return device.platform, device.device_kind
    return jax.default_backend(), jax.devices()[0].device_kind


def chooses_behind_updates() -> bool:
    """Whether a skipped step is a choice behind each number, and not a branch around the update.

    On CPUs a branch is better: it costs nothing, while a choice between old and new makes XLA copy
    every moment. On GPUs it is the other way round:

    - A choice is free. One kernel reads gradient, parameter and moments, and writes what is new or
      what was there. A branch divides it in two, for nothing is fused across its border: for AdamW
      that is 8 bytes a parameter more.
    - A branch is not free. The host waits for the predicate before it launches what is inside, so
      nothing of the rest of the step is handed over ahead.

    A skip costs as much as a step then. But few steps are skipped.
    """
    return has_started() and find_device()[0] == "gpu"


def reduces_beside_updates() -> bool:
    """Whether a reduction over devices can run beside updates: on CPUs nothing does."""
    return has_started() and find_device()[0] != "cpu"


def has_started() -> bool:
    """Whether JAX knows its devices. To ask for them would start it, for good.

    `jax.eval_shape` must not do that: `jax.distributed.initialize` may be still to come.
    """
    # There is no public way to ask. Without this one tracing starts JAX.
    from jax._src import xla_bridge

    return getattr(xla_bridge, "backends_are_initialized", lambda: True)()
