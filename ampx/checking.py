"""Checks of arguments that several transformations share, and the words of their errors."""

from __future__ import annotations

from typing import Any


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses a word that is not among the choices.

    Args:
      name: of the argument, for the error.
      value: what was given for it.
      choices: what is allowed, as from `typing.get_args` of a `Literal`.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_positive_int(name: str, value: Any) -> None:
    """Refuses what is not an int of at least 1; True is not an int here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be a positive int, got {value!r} of type {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name} must be a positive int, got {value}")


def check_transformation(name: str, value: Any) -> None:
    """Refuses what is not an optax gradient transformation."""
    # By its two functions, not by its class: users write transformations as classes of their own.
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} must be an optax gradient transformation, got {type(value).__name__}: "
            "give the optimizer, such as optax.adamw(3e-4)"
        )
