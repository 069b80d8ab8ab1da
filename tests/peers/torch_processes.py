"""What each of two torch processes computes for `test_torch_data_parallel.py`, over gloo.

    python torch_processes.py FOLDER RANK

reads the parameters and batches from FOLDER/inputs.npz and writes FOLDER/RANK.npz. A process has
half the rows of every batch.
"""

import contextlib
import pathlib
import sys
import unittest.mock
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PROCESSES, STEPS, MICROBATCHES = 2, 4, 2
NAMES = ("first", "bias", "second")
RATE, MOMENTUM, DECAY, MAX_NORM = 0.05, 0.9, 0.1, 0.5
# A scenario: sharded moments, micro-batches whose gradients are not reduced, a bucket for each
# parameter, gradients that travel in bfloat16, and a clip under a loss scale, with one bad step.
SCENARIOS = {
    "ddp": (),
    "no_sync": ("no_sync",),
    "buckets": ("buckets", "no_sync"),
    "bfloat16": ("bfloat16",),
    "scaler": ("scaler",),
    "zero": ("zero",),
    "zero with scaler": ("zero", "scaler"),
}


class Model(torch.nn.Module):
    """A tanh layer and a linear one."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, torch.nn.Parameter(torch.tensor(inputs[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.second


def run(inputs: Any, rank: int, traits: tuple[str, ...]) -> dict[str, np.ndarray]:
    reductions: list[int] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduce = bf16_compress_hook if "bfloat16" in traits else allreduce_hook
        all_reduce = dist.all_reduce

        def count(tensor: torch.Tensor, **options: Any) -> Any:
            reductions.append(tensor.nbytes)
            return all_reduce(tensor, **options)

        with unittest.mock.patch.object(dist, "all_reduce", count):
            return reduce(None, bucket)

    model = Model(inputs)
    # torch's buckets are at most so large, but hold at least one parameter.
    size = {"bucket_cap_mb": 1e-6} if "buckets" in traits else {}
    replicated = DistributedDataParallel(model, **size)
    replicated.register_comm_hook(None, hook)
    if "zero" in traits:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=RATE, weight_decay=DECAY
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    has_scaler = "scaler" in traits
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2, enabled=has_scaler)
    count = MICROBATCHES if "no_sync" in traits else 1
    counts, sizes, scales = [], [], []
    for step in range(STEPS):
        reductions.clear()
        optimizer.zero_grad()
        xs, ys = (torch.tensor(inputs[key][step]).chunk(PROCESSES)[rank] for key in "xy")
        if has_scaler and step == 1 and rank == 1:
            xs = torch.full_like(xs, torch.inf)
        parts = list(zip(xs.chunk(count), ys.chunk(count), strict=True))
        for number, (x, y) in enumerate(parts):
            is_last = number == count - 1
            with contextlib.nullcontext() if is_last else replicated.no_sync():
                loss = torch.mean((replicated(x) - y) ** 2) / count
                scaler.scale(loss).backward()
        if has_scaler:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        counts.append(len(reductions))
        sizes.append(sum(reductions))
        scales.append(scaler.get_scale())
    found = {name: getattr(model, name).detach().numpy() for name in NAMES}
    if "zero" in traits:
        own = [state["exp_avg"].numel() for state in optimizer.optim.state.values()]
        found["moments"] = np.array(sum(own))
    return {**found, "counts": counts, "bytes": sizes, "scales": scales}


def run_sharded(grads: np.ndarray, rank: int) -> dict[str, np.ndarray]:
    """A scale over parameters that are divided; `grads` are f32[steps, processes, numbers]."""
    param = torch.nn.Parameter(torch.zeros(grads.shape[-1]))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = ShardedGradScaler("cpu", 8.0, growth_interval=2)
    params, scales, trackers = [], [], []
    for own in grads[:, rank]:
        param.grad = scaler.scale(torch.tensor(own))
        scaler.step(optimizer)
        scaler.update()
        params.append(param.detach().numpy().copy())
        scales.append(scaler.get_scale())
        trackers.append(scaler._get_growth_tracker())
    return {"params": np.stack(params), "scales": np.array(scales), "trackers": np.array(trackers)}


def main(folder: pathlib.Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    with np.load(folder / "inputs.npz") as inputs:
        arrays = dict(inputs)
    results = {
        f"{name}/{key}": np.asarray(value)
        for name, traits in SCENARIOS.items()
        for key, value in run(arrays, rank, traits).items()
    }
    sharded = run_sharded(arrays["sharded"], rank)
    results |= {f"sharded/{key}": value for key, value in sharded.items()}
    np.savez(folder / f"{rank}.npz", **results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
