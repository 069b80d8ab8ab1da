"""What XLA may leave out in tests, where compiling costs most and speed matters little."""

import jaxlib


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
