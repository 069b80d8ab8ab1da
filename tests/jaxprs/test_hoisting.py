"""Sums of operands are taken out of a program, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.jaxprs.hoisting import hoist_sums
from ampx.jaxprs.reading import is_literal, open_jaxpr, trace

GRADS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32)]


def split(fun):
    """The equations before the branch, and those of the branch that computes the rest."""

    def program(skip, other, *grads):
        jaxpr, _ = trace(lambda *given: fun(other, *given), *grads)
        rest = hoist_sums(jaxpr, grads, len(grads))
        return jax.lax.cond(skip, lambda: [jnp.zeros_like(x) for x in rest()], rest)

    jaxpr = open_jaxpr(jax.make_jaxpr(program)(False, 2.0, *GRADS))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    (branch,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    inside = open_jaxpr(branch.params["branches"][0])  # `skip` is false
    found = jax.jit(program)(False, 2.0, *GRADS)
    np.testing.assert_allclose(
        np.concatenate([np.ravel(x) for x in found]),
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(fun(2.0, *GRADS))]),
        rtol=1e-6,
    )
    return names, [eqn.primitive.name for eqn in inside.eqns]


def test_the_norm_of_a_clip_is_taken_out():
    clip = optax.clip_by_global_norm(1.0)

    def clipped(other, *grads):
        return [other * g for g in clip.update(grads, clip.init(grads))[0]]

    before, inside = split(clipped)
    assert before.count("reduce_sum") == 2 and "sqrt" in before
    assert "reduce_sum" not in inside and "square" not in inside and "sqrt" not in inside
    assert "div" in inside and "div" not in before


def test_each_equation_reads_a_copy_of_its_own():
    clip = optax.clip_by_global_norm(1.0)

    def program(skip, *grads):
        jaxpr, _ = trace(lambda *given: clip.update(list(given), clip.init(given))[0], *grads)
        rest = hoist_sums(jaxpr, grads, len(grads))
        return jax.lax.cond(skip, lambda: list(grads), rest)

    jaxpr = open_jaxpr(jax.make_jaxpr(program)(False, *GRADS))
    (branch,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    inside = open_jaxpr(branch.params["branches"][0])  # `skip` is false
    numbers = {var for var in inside.invars if var.aval.shape == ()}
    atoms = {id(eqn): [var for var in eqn.invars if not is_literal(var)] for eqn in inside.eqns}
    direct = [eqn for eqn in inside.eqns if not numbers.isdisjoint(atoms[id(eqn)])]
    assert numbers and {eqn.primitive.name for eqn in direct} == {"optimization_barrier"}
    copies = [out for eqn in direct for out in eqn.outvars]
    read = [var for own in atoms.values() for var in own]
    # Of each leaf: whether it is clipped, and the norm that it is divided by.
    assert len(copies) == 2 * len(GRADS) and all(read.count(copy) == 1 for copy in copies)


def test_sums_of_other_things_stay():
    def fun(other, *grads):
        return [jnp.sum(g * other) + jnp.max(g) for g in grads], jnp.sum(grads[0], axis=0)

    before, inside = split(fun)
    assert "reduce_sum" not in before
    assert inside.count("reduce_sum") == 3 and inside.count("reduce_max") == 2


def test_sums_of_later_operands_stay():
    """Those of parameters: a step that is skipped need not read them."""

    def program(*operands):
        jaxpr, _ = trace(lambda g, p: [jnp.sum(g), jnp.sum(p)], *operands)
        return jax.lax.cond(True, hoist_sums(jaxpr, operands, 1), lambda: [0.0, 0.0])

    names = [eqn.primitive.name for eqn in open_jaxpr(jax.make_jaxpr(program)(*GRADS)).eqns]
    assert names.count("reduce_sum") == 1


def test_a_result_may_be_a_sum_alone():
    before, inside = split(lambda other, *grads: [jnp.sum(grads[0]), other])
    assert "reduce_sum" in before and "reduce_sum" not in inside


def test_effects_stay_where_they_are():
    def fun(other, *grads):
        jax.debug.callback(lambda x: None, jnp.sum(grads[0]))
        return [grads[0] * other]

    before, inside = split(fun)
    assert "debug_callback" in inside and "debug_callback" not in before
