"""What compiling may leave out or share in tests, where it costs most and speed matters little."""

import itertools
from typing import Any

import jaxlib
from jax._src import pjit
from jax._src.interpreters import mlir


def quick_compiler() -> str:
    """Flags for XLA on CPUs: its own passes stay, LLVM's optimization is left out.

    XLA's older emitters, which write a loop with less code around it, compile 2 to 3 times faster.
    They are gone in jaxlib 0.11, where XLA ends a process that names a flag it does not know.
    """
    flags = ["--xla_backend_optimization_level=0"]
    if tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 11):
        flags += [
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
    return " ".join(flags)


def share_contexts(uses: int = 100) -> None:
    """Lets programs share the MLIR context in which JAX writes them down, some of them one.

    JAX makes one for each program and loads all dialects into it, which takes as long as the rest
    of lowering a small program and holds a megabyte. Contexts never forget a constant or a source
    line, so none serves for ever.
    """
    make, counter, shared = mlir.make_ir_context, itertools.count(), []

    def make_or_share() -> Any:
        if next(counter) % uses == 0 or not shared:  # another thread may be making the first
            shared[:] = [make()]
        return shared[0]

    mlir.make_ir_context = make_or_share


def widen_dispatch_caches(entries: int = 1 << 17) -> None:
    """Lets every function of a long run be called by JAX's fast path, and its cache be counted.

    One cache of 8,192 entries serves all jitted functions and eager operations of a process. Once
    it is full, a new function gets no entry: each call takes JAX's slow path through Python, and
    `_cache_size()` says 0 of a function that was compiled.
    """
    pjit._cpp_pjit_cache_fun_only = pjit.make_jit_cpp_cache(entries)
    pjit._cpp_pjit_cache_explicit_attributes = pjit.make_jit_cpp_cache(entries)
