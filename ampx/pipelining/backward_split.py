"""A backward pass in two: gradients of a stage's inputs first, of its weights when there is time.

The stage before waits for the first half only. What the second half reads of the first is kept in
between.
"""

from __future__ import annotations

from typing import NamedTuple

from ampx import jaxprs


class Halves(NamedTuple):
    """Two jaxprs that do the work of one.

    Attributes:
      inputs: from all operands to the gradients of inputs, followed by what is kept.
      weights: from some operands and what was kept to the gradients of weights.
      reads: which operands `weights` takes, by number.
    """

    inputs: jaxprs.Jaxpr
    weights: jaxprs.Jaxpr
    reads: tuple[int, ...]


def split_backward(jaxpr: jaxprs.Jaxpr, num_weights: int) -> Halves:
    """Divides a jaxpr whose first outputs are gradients of weights, the others of inputs.

    An equation that both need is in the first half. Loops are not divided: unroll them before.
    """
    whole = jaxprs.inlined(jaxpr)
    body = jaxprs.open_jaxpr(whole)
    of_weights, of_inputs = body.outvars[:num_weights], body.outvars[num_weights:]
    first = jaxprs.equations_for(body, of_inputs)
    second = [i for i in jaxprs.equations_for(body, body.outvars) if i not in set(first)]
    made_first = {out for i in first for out in body.eqns[i].outvars}
    made_second = {out for i in second for out in body.eqns[i].outvars}
    wanted = [atom for i in second for atom in body.eqns[i].invars] + list(of_weights)
    wanted = [v for v in dict.fromkeys(a for a in wanted if not jaxprs.is_literal(a))]
    kept = [v for v in wanted if v in made_first]
    reads = [i for i, v in enumerate(body.invars) if v in set(wanted) - made_second]
    return Halves(
        jaxprs.rebuilt(whole, body.invars, [*of_inputs, *kept], [body.eqns[i] for i in first]),
        jaxprs.rebuilt(
            whole,
            [*(body.invars[i] for i in reads), *kept],
            of_weights,
            [body.eqns[i] for i in second],
        ),
        tuple(reads),
    )
