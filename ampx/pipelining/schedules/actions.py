"""What one stage does with one micro-batch, in the notation of torch's schedules: `"2F0"`.

The kinds of actions::

  F   forward          needs F of the stage before, on the same micro-batch
  B   whole backward   needs its own F, and B or I of the stage behind
  I   its first half: the gradient of the stage's input; needs what B needs
  W   its second half: the gradient of the stage's weights; needs its own I

Nobody but the optimizer waits for a `W`. Whoever waits for a `B` waits for the gradient in it that
an `I` makes alone. So `needs_of` and `result_of` call that gradient `I` in either case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, get_args

from ampx.checking import shorten
from ampx.summaries import show_fields

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One step of one stage.

    Attributes:
      stage: which stage, counted from 0 along the model.
      kind: `"F"` forward; `"B"` the whole backward, or its two halves: `"I"`, gradients of the
        stage's input, and `"W"`, gradients of its weights.
      microbatch: which micro-batch.

    Examples:
      >>> from ampx.pipelining import Action
      >>> print(Action(2, "F", 0))
      2F0
    """

    stage: int
    kind: Kind
    microbatch: int

    __repr__ = show_fields

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Reads `"2F0"`: stage 2, forward, micro-batch 0.

    Args:
      text: stage, kind and micro-batch; blanks around them do not matter.

    Returns:
      The action.

    Raises:
      ValueError: for any other text, for numbers of more than nine digits, and for what torch adds
        to a schedule to send, receive, reduce or gather: in ampx these are not in a schedule.

    References:
      torch.distributed.pipelining, whose schedules print their actions so.

    Examples:
      >>> from ampx.pipelining.schedules.actions import parse_action
      >>> parse_action("0W3")
      Action(stage=0, kind='W', microbatch=3)
    """
    # Nine digits are enough for anybody. Python itself refuses to read some thousands.
    found = re.fullmatch(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})", text.strip())
    if found is None or found[2] not in get_args(Kind):
        raise ValueError(
            "an action is a stage, one of F, B, I, W, and a micro-batch, such as 2F0; got "
            f"{shorten(text)}"
        )
    return Action(int(found[1]), cast(Kind, found[2]), int(found[3]))


def result_of(action: Action) -> Action:
    """Names an action as those do that wait for its result: a whole backward counts as its `I`."""
    return action._replace(kind="I") if action.kind == "B" else action


def needs_of(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Lists the results, named as by `result_of`, that an action needs before it can start."""
    stage, kind, microbatch = action
    # The first stage reads the batch, which is there; the last one begins the backward by itself.
    if kind == "F":
        return (Action(stage - 1, "F", microbatch),) if stage else ()
    if kind == "W":
        return (Action(stage, "I", microbatch),)
    own = Action(stage, "F", microbatch)
    return (own, Action(stage + 1, "I", microbatch)) if stage + 1 < num_stages else (own,)


def merge_backwards(actions: Iterable[Action | None]) -> list[Action]:
    """Makes one `B` of every `I` that its own `W` follows at once.

    Args:
      actions: of one device, in their order. Idle places are left out.

    Returns:
      The merged actions.

    References:
      `_merge_bw` in torch.distributed.pipelining.

    Examples:
      >>> from ampx.pipelining.schedules.actions import merge_backwards, parse_action
      >>> actions = [parse_action(text) for text in "0I1 0W0 0I2 0W2".split()]
      >>> " ".join(map(str, merge_backwards(actions)))
      '0I1 0W0 0B2'
    """
    # Two halves with anything between them stay apart: what was between would come later.
    merged: list[Action] = []
    for action in actions:
        if action is None:
            continue
        if merged and action.kind == "W" and merged[-1] == action._replace(kind="I"):
            merged[-1] = action._replace(kind="B")
        else:
            merged.append(action)
    return merged


def split_backwards(actions: Iterable[Action | None]) -> list[Action]:
    """Makes an `I` and, right after it, a `W` of every `B`: undoes `merge_backwards`.

    Args:
      actions: of one device, in their order. Idle places are left out.

    Returns:
      The actions without any `B`.

    Examples:
      >>> from ampx.pipelining.schedules.actions import parse_action, split_backwards
      >>> " ".join(map(str, split_backwards([parse_action("0F2"), parse_action("0B2")])))
      '0F2 0I2 0W2'
    """
    split: list[Action] = []
    for action in actions:
        if action is not None and action.kind == "B":
            split += [action._replace(kind="I"), action._replace(kind="W")]
        elif action is not None:
            split.append(action)
    return split
