"""The flags of the language model, and the runs that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from ampx.examples import meshes, pipelined
from ampx.examples.configs import OPTIMIZERS, Config, compared_configs


class Command(NamedTuple):
    """What a command line asks for.

    Attributes:
      configs: the runs; six of them if no precision is given.
      output: file for the picture.
      progress: whether to show progress bars.
      processes: the last three arguments of `meshes.start`.
      seeds: each run is repeated with each of them; None for one run with the seed of its `Config`.

    Examples:
      >>> from ampx.examples import command_line
      >>> command = command_line.read(command_line.make_parser().parse_args([]))
      >>> len(command.configs), str(command.output)
      (6, 'language_model.png')
    """

    configs: list[Config]
    output: Path
    progress: bool
    processes: dict[str, Any]
    seeds: list[int] | None = None


def read(flags: argparse.Namespace) -> Command:
    """What flags ask for.

    Args:
      flags: from `make_parser`.

    Returns:
      A `Command`.

    Raises:
      ValueError: for flags that are wrong or contradict each other.

    Examples:
      >>> from ampx.examples import command_line
      >>> flags = "--precision O2 --mesh stage=2 --schedule gpipe".split()
      >>> (config,) = command_line.read(command_line.make_parser().parse_args(flags)).configs
      >>> config.label, config.num_microbatches
      ('O2 bfloat16', 4)
    """
    # A flag that is not given is None, and its default stands in one place: `Config`.
    given = {name: value for name, value in vars(flags).items() if value is not None}
    output, progress = given.pop("output"), not given.pop("no_progress")
    processes = {name: given.pop(name) for name in meshes.PROCESS_FLAGS if name in given}
    seeds = given.pop("seeds", None)
    if seeds is not None and "seed" in given:
        raise ValueError(f"--seed {given['seed']} and --seeds exclude each other: give one of them")
    configs = _configs(given)
    for seed in seeds or ():
        dataclasses.replace(configs[0], seed=seed)  # which refuses a seed that is wrong
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must differ from each other, got {' '.join(map(str, seeds))}")
    if output.suffix != ".png" or not output.parent.is_dir():
        raise ValueError(f"--output must be a .png file in a folder that exists, got {output}")
    # All runs have the same mesh and layers, so the first speaks for all.
    schedule = configs[0].pipeline
    if schedule is not None:
        pipelined.check_layers(configs[0].layers, schedule)
    return Command(configs, output, progress, processes, seeds)


def _configs(given: dict[str, Any]) -> list[Config]:
    if "precision" in given:
        config = Config(**given)
        if "init_scale" in given and config.policy.loss_scale != "dynamic":
            raise ValueError(
                f"--init-scale needs a dynamic loss scale, not {config.policy.loss_scale}"
            )
        return [config]
    # Flags that have a meaning for one precision only.
    alone = ("half", "dots", "loss_scale", "init_scale", "final_loss")
    alone = [name for name in alone if name in given]
    if alone:
        flag = "--" + alone[0].replace("_", "-")
        raise ValueError(f"{flag} needs --precision: without it, six precisions are compared")
    return compared_configs(Config(**given))


def make_parser() -> argparse.ArgumentParser:
    """The parser; a flag that is not given is None.

    Returns:
      A parser.

    Examples:
      >>> from ampx.examples import command_line
      >>> command_line.make_parser().parse_args(["--layers", "4"]).layers
      4
    """
    parser = argparse.ArgumentParser(
        prog="python -m ampx.examples.language_model",
        usage="%(prog)s [flags]",
        description="Train a small language model at one precision, or compare six (no flags).",
    )
    flag = parser.add_argument
    flag(
        "--precision",
        help="O0, O1, O2, O3, float32, a policy such as p=f32,c=bf16,o=f32, or a schedule such as "
        "'fast|step|0.9'",
    )
    flag("--final-loss", type=float, metavar="X", help="that a 'fast|loss|1.05' is relative to")
    flag("--half", choices=("float16", "bfloat16"), help="half type of O1, O2 and O3 (bfloat16)")
    flag("--dots", metavar="RECIPE", help="float8, or a recipe of it: products of O1 in 8 bits")
    flag("--loss-scale", metavar="SCALE", help="dynamic, none or a number (the precision's own)")
    flag("--init-scale", type=float, metavar="SCALE", help="first dynamic loss scale (65536)")
    flag(
        "--microbatches",
        type=int,
        metavar="N",
        help="slices of each device's batch (1; in a pipeline 2 for each stage)",
    )
    flag("--steps", type=int, metavar="N", help=f"training steps ({Config.steps})")
    flag("--batch-size", type=int, metavar="N", help=f"windows in a batch ({Config.batch_size})")
    flag("--optimizer", choices=OPTIMIZERS, metavar="NAME", help=f"{', '.join(OPTIMIZERS)}")
    flag("--learning-rate", type=float, metavar="X", help=f"its peak ({Config.learning_rate})")
    flag("--max-grad-norm", type=float, metavar="X", help=f"clip to ({Config.max_grad_norm})")
    flag("--seed", type=int, metavar="N", help=f"of parameters and batches ({Config.seed})")
    flag("--seeds", type=int, nargs="+", metavar="N", help="repeat with each, and print ranges")
    flag("--layers", type=int, metavar="N", help=f"layers of the model ({Config.layers})")
    meshes.add_flags(parser)
    flag(
        "--schedule",
        choices=pipelined.SCHEDULES,
        metavar="NAME",
        help=f"of a mesh with stages: {', '.join(pipelined.SCHEDULES)} (1f1b)",
    )
    flag(
        "--output",
        type=Path,
        metavar="FILE.png",
        default=Path("language_model.png"),
        help="picture",
    )
    flag("--no-progress", action="store_true", help="show no progress bars")
    return parser
