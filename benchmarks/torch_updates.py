"""Torch's fused AdamW, which updates of `ampx.fused` are timed beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks.measuring import Candidate

try:
    import torch
except (ImportError, OSError):  # not installed, or a library of CUDA is missing
    torch: Any = None

NAMES = {
    "torch, fused AdamW alone": (False, False),
    "torch, clip + fused AdamW": (True, False),
    "torch, check + clip + fused AdamW": (True, True),
}


def torch_candidates(shapes: Sequence[tuple[int, ...]], repeats: int = 1) -> Iterator[Candidate]:
    """Torch's fused AdamW: alone, clipped, and clipped with the check of its GradScaler.

    Args:
      shapes: of the parameters, float32 all of them.
      repeats: steps of one call, which waits for the GPU once.

    Raises:
      ImportError: if torch is not there.
    """
    if torch is None:
        raise ImportError("torch is not installed")
    for name, (has_clip, has_check) in NAMES.items():
        yield Candidate(name, _step(shapes, has_clip, has_check, repeats), None, ())


def _step(
    shapes: Sequence[tuple[int, ...]], has_clip: bool, has_check: bool, repeats: int
) -> Callable[[None], None]:
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    make = {"device": device, "dtype": torch.float32}
    params = [torch.nn.Parameter(torch.full(shape, 0.1, **make)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    grads = [param.grad for param in params]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)
    one, found = torch.ones((), **make), torch.zeros((), **make)
    # GradScaler sets these on a fused optimizer: no scale is left to divide by, and the step is
    # skipped where `found` is 1.
    if has_check:
        optimizer.grad_scale, optimizer.found_inf = None, found

    def step(_: None) -> None:
        for _ in range(repeats):
            if has_check:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
            if has_clip:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step
