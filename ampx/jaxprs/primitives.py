"""Families of JAX's primitives, each named by a property that all of its members share.

Programs over jaxprs ask what an equation does to the numbers in an array: whether it computes on
them one by one, only moves them, chooses among them, or sends them to other devices. Each family
here answers one such question, and its comment states the property that decides about membership.
A module that needs a set of its own builds it from these families, so that a primitive which a new
JAX brings is added in one place.

Families overlap (`max` is elementwise and chooses) and hold names of several versions of JAX. What
is not in a family must be treated as lacking its property. What precision a primitive should run
in is a decision, not a property: `ampx.autocasting.tables` holds those.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """The set of the words in a text."""
    return frozenset(text.split())


# result[i] = first[i] < second[i], or another order or equality: bools, exact in every dtype.
COMPARING = names("eq ne lt le gt ge eq_to lt_to le_to")
# result[i] = first[i] + second[i], or their difference. `add_any` is what sums cotangents.
ADDING = names("add add_any sub")
# result[i] is one of the operands' numbers at i: nothing is computed.
CHOOSING = names("select_n max min clamp")
# Each number of the result is a sum of products of numbers of both operands.
CONTRACTIONS = names("dot_general ragged_dot_general conv_general_dilated")
# A few instructions for each number, so that computing it again costs less than to write it to
# memory and to read it back. What takes a dozen (exp, tanh) is not among them.
CHEAP = (
    COMPARING
    | ADDING
    | CHOOSING
    | names("abs neg sign mul div square integer_pow and or xor not convert_element_type")
)
# The result is the operand. They differ in what they tell JAX: `name` marks a residual for remat.
IDENTITIES = names("copy name stop_gradient")
# result[i] depends on the operands' numbers at i alone, so a primitive of this family commutes with
# slicing: f(x, y)[part] == f(x[part], y[part]). Operands have the shape of the result, or are
# scalars, which serve every i.
ELEMENTWISE = (
    COMPARING
    | ADDING
    | CHOOSING
    | IDENTITIES
    | names(
        """
        abs neg sign floor ceil round is_finite nextafter
        mul div rem reciprocal square one_minus_square integer_pow pow sqrt rsqrt cbrt
        exp exp2 expm1 log log1p log2 logistic tanh
        sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh
        erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a
        regularized_incomplete_beta bessel_i0e bessel_i1e
        and or xor not shift_left shift_right_arithmetic shift_right_logical
        population_count clz mulhi
        real imag conj complex
        convert_element_type reduce_precision
        """
    )
)
# Each number of the results is a number of the one array operand, at a place that its shape and
# the parameters decide (for dynamic_slice, integer operands too): permuted, repeated or left out.
# A gather is not among them: it fills in a number of its own for an index out of bounds.
REARRANGING = names(
    """broadcast_in_dim broadcast_to tile reshape transpose squeeze rev slice dynamic_slice split
    unstack"""
)
# They say where the parts of an array lie, or in which order in memory: its numbers are the same.
PLACEMENTS = names("sharding_constraint layout_constraint reshard relayout")
# Casts between the types that values have over the axes of a mesh, inside shard_map: varying,
# invariant, reduced or unreduced. On a device they do nothing, though they name axes as collectives
# do. (Some names end in `_p` in JAX itself.)
AXIS_TYPE_CASTS = names(
    """pvary pcast preduced reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast
    vary_unreduced_cast_p"""
)
# Result i is operand i, number for number, if there are as many of both.
SAME_NUMBERS = IDENTITIES | PLACEMENTS | AXIS_TYPE_CASTS | names("optimization_barrier")
# Sums over the devices along mapped axes.
PSUMS = names("psum psum_invariant unreduced_psum")
# Operand i becomes result i on every device: its reduction over all of them.
ALL_REDUCTIONS = PSUMS | names("pmax pmin")
# Each of n devices ends with 1/n of what a reduction or an exchange of all parts gives: in a ring
# it sends half of what an all-reduce sends, (n - 1)/n of its operand.
SCATTERING_COLLECTIVES = names("reduce_scatter unreduced_reduce_scatter all_to_all")
# Each number of a result is a number that some device holds: exact in every dtype.
TRANSFERS = names(
    """all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute
    pbroadcast pmax pmin"""
)
# They run one jaxpr once, and its inputs and outputs are theirs, in the same order.
CALLS = names("jit pjit remat2 checkpoint closed_call call core_call")
# The same, with functions beside the jaxpr that say how to differentiate it.
CUSTOM_RULES = names("custom_jvp_call custom_vjp_call")
# They run their jaxprs any number of times.
LOOPS = names("scan while")
