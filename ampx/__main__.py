"""`python -m ampx`: what is installed and what this machine can do; `doctor` lints a step."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import get_args

import ampx
from ampx.diagnostics.environment import describe_environment
from ampx.diagnostics.lint_findings import CheckName
from ampx.diagnostics.step_files import EXAMPLE_ARGS, StepFileError, lint_file
from ampx.text_tables import print_report

_DOCTOR = f"""\
Traces a training step and reports its faults with their lines, as ampx.lint_step does. Nothing of
the step is run. FILE is imported, without arguments, so begin training behind
`if __name__ == "__main__":`. It may be the name of a module, too, as for `python -m`. It also says
what the step is called with, by a tuple or by a function that gives one:

    def {EXAMPLE_ARGS}():
        return state, jax.ShapeDtypeStruct((64, 128), jnp.float32)

The exit status is 0 if nothing was found, 1 if something was, and 2 if there was nothing to trace:
no such file or step, or an error in the file or in the trace of the step.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; `--help` tells more.

    Args:
      argv: arguments, `sys.argv` by default.

    Returns:
      The exit status: 1 if `doctor` found a fault, 2 if the user's file or its step raised.

    Raises:
      SystemExit: for arguments that are wrong.

    Examples:
      >>> from ampx.__main__ import main
      >>> main(["doctor", "train.py:step", "--args", "example_args"])  # doctest: +SKIP
    """
    parser = argparse.ArgumentParser(
        prog="python -m ampx",
        description="Without a command: versions, devices, what they do in half precision, which "
        "kernels apply, optional parts and how to install them.",
    )
    commands = parser.add_subparsers(dest="command", metavar="doctor")
    doctor = commands.add_parser(
        "doctor",
        help="look for faults in a training step that no figure of it shows",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "target", metavar="FILE:STEP", help="such as train.py:step or pkg.train:step"
    )
    doctor.add_argument(
        "--args",
        metavar="NAME",
        default=EXAMPLE_ARGS,
        help="the tuple or function in FILE that gives the arguments (default: %(default)s)",
    )
    doctor.add_argument(
        "--ignore",
        metavar="CHECK",
        action="append",
        default=[],
        choices=get_args(CheckName),
        help="leave a check out; may be given several times: %(choices)s",
    )
    flags = parser.parse_args(argv)
    if flags.command is None:
        print_report(describe_environment(ampx.__version__))
        return 0
    try:
        report = lint_file(flags.target, args=flags.args, ignore=flags.ignore)
    except StepFileError as error:
        doctor.error(str(error))
    except Exception:  # of the user's own file: Python would end with 1, which tells of a fault
        traceback.print_exc()
        return 2
    print_report(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
