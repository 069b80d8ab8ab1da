"""Which precision each primitive runs in, by default, and what else decides about it.

The lists follow Apex's `lists/torch_overrides.py` and torch's autocast op lists, mapped from
functions to the primitives that JAX makes of them. A primitive that is in no list is opaque: it
gets the dtypes that it was traced with.

Two properties of the half types decide. Their *range*: float16 ends at 65504, and its smallest
number above 0 is 6e-8; bfloat16 has the range of float32. And their *spacing*: next to 1, numbers
are 2**-10 apart in float16 and 2**-7 in bfloat16, so a result is rounded by a relative 2**-11 or
2**-8. An operation needs float32 if its results leave the range, or if it turns a small error of
its operands into a large one of its result: because it adds up many terms, cancels, or is steep.

Below the lists stand sets of primitives with a property that changes a decision. Properties that
have nothing to do with precision are in `ampx.jaxprs.primitives`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from ampx.jaxprs import primitives

# Two that only a user's rule gives, and only to products: half operands with a float32 result, and
# float8 operands where the setting `dots` says how.
Precision = Literal[
    "half", "half_to_float32", "float8", "float32", "widest", "pass", "recurse", "opaque", "banned"
]
# Nearly all the arithmetic of a model. Matrix units take half operands at a multiple of the speed
# of float32, and add up the products in float32: only operands and the final result are rounded.
_HALF = "dot_general conv_general_dilated ragged_dot_general"
_FLOAT32 = " ".join(
    (
        # Range: float16 overflows from exp(11.1) on. And steepness: exp turns an absolute error of
        # its argument into a relative one of its result. Near 70 bfloat16 is off by up to 0.25,
        # which is a factor of 1.28.
        "exp exp2 expm1 pow polynomial tan sinh cosh",
        # Cancellation: next to 1, where logarithms are small, 1 - 2**-10 rounds to 1 in bfloat16,
        # and its logarithm to 0.
        "log log1p log2",
        # Range: a variance of 1e-8 is 0 in float16, 1 / sqrt(0) infinite, and so is the quotient
        # 1 / x for any x below 1.5e-5. Derivatives of roots are quotients, too.
        "rsqrt sqrt cbrt reciprocal",
        # Steep at the ends of their domain: acos(1) = 0 and acos(1 - 2**-8) = 0.09. asinh and acosh
        # are logarithms.
        "asin acos asinh acosh atanh erf_inv",
        # Computed by series and recurrences, in which rounding errors add up.
        "lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta",
        "bessel_i0e bessel_i1e",
        # A sum in half stops growing where a term is less than half a spacing: a sum of ones ends
        # at 256 in bfloat16 and at 2048 in float16. Products of many numbers leave the range.
        "reduce_sum reduce_prod reduce_window_sum cumsum cumprod cumlogsumexp",
        "select_and_gather_add",
        # Their function is given as a jaxpr, and may be a sum.
        "reduce reduce_window",
        # Their libraries have no half, and their errors grow with the condition of the matrix: at
        # 2**-8 already a condition of 256 leaves no correct digit.
        "fft cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig eigh",
        "schur hessenberg triangular_solve tridiagonal tridiagonal_solve symmetric_product",
        # The second is lineax's, by which Optimistix and Diffrax differentiate what they solve.
        "custom_linear_solve linear_solve",
    )
)
# Several operands, which must have one dtype. The widest loses nothing of any of them.
_WIDEST = " ".join(
    (
        # One rounding of a result that is as exact as its operands.
        "add add_any sub mul div rem max min atan2 clamp select_n",
        # They put arrays together. Index operands are integers and have no say.
        "concatenate stack pad dynamic_update_slice",
        "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max",
        "select_and_scatter select_and_scatter_add",
        # Their results are bools, but an operand that is rounded to the dtype of the other compares
        # otherwise.
        "eq ne lt le gt ge eq_to lt_to le_to",
    )
)
# One operand that matters: the result has its dtype, and is as exact as the operand was.
_PASS = " ".join(
    (
        # Exact in every dtype.
        "abs neg sign floor ceil round is_finite",
        # Bounded, and nowhere steep: an error of the operand is hardly larger in the result.
        "tanh logistic erf erfc sin cos atan",
        # Products of an operand with itself. Squares overflow in float16, but most are read by a
        # sum, and are then lifted to float32.
        "square integer_pow one_minus_square",
        # They move numbers.
        "broadcast_in_dim broadcast_to reshape transpose squeeze rev slice dynamic_slice gather",
        "tile split unstack copy name stop_gradient",
        # They choose one of their operand's numbers, or order them.
        "reduce_max reduce_min argmax argmin reduce_window_max reduce_window_min cummax cummin",
        "sort top_k approx_top_k",
        # Decided by the dtypes it converts between: `operations._decide_conversion`.
        "convert_element_type",
        # What they are given travels between devices, and float32 is twice the bytes. Sums over few
        # devices lose little; a sum that only float32 reads is lifted.
        "psum psum_invariant pmax pmin ppermute pbroadcast all_gather all_gather_invariant",
        "all_gather_reduced all_to_all reduce_scatter ragged_all_to_all preduced",
        "unreduced_psum unreduced_reduce_scatter unreduced_pmax unreduced_pmin",
        # They say where an array lies, or over which devices it varies.
        "pvary pcast reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast",
        "vary_unreduced_cast_p sharding_constraint layout_constraint relayout reshard device_put",
        "with_memory_space_constraint optimization_barrier",
    )
)
# Their bodies are planned and rewritten: calls.py.
_RECURSE = " ".join(
    primitives.CALLS
    | primitives.CUSTOM_RULES
    | primitives.LOOPS
    | {"cond", "eval_jaxpr", "shard_map"}
)
# What they get and give is part of their meaning, or cannot be changed from outside.
_OPAQUE = " ".join(
    (
        # Bit patterns. reduce_precision rounds on purpose; `ampx.cast` holds float32 by it.
        "bitcast_convert_type reduce_precision nextafter clz population_count mulhi not and or xor",
        "shift_left shift_right_arithmetic shift_right_logical reduce_and reduce_or reduce_xor",
        # Complex numbers, which have no half, and arrays that are made from nothing.
        "real imag complex conj iota empty empty2 zeros_like create_token after_all axis_index",
        # Random numbers: in another dtype they would be other numbers.
        "random_bits random_seed random_split random_fold_in random_gamma random_wrap",
        "random_unwrap random_clone rng_bit_generator rng_uniform threefry2x32 threefry4x32",
        "philox2x32 philox4x32 iota_2x32_shape",
        # Kernels, compiled for the dtypes that they were written for.
        "pallas_call mpmd_map ffi_call cudnn_fusion custom_partitioning composite scaled_dot",
        "scaled_matmul scaled_matmul_wrapper",
        "dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd",
        "dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd",
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd",
        "dot_product_attention_fp8_bwd_wrapper",
        # Python on the host sees the dtypes; shapes and checks have none.
        "pure_callback io_callback debug_callback debug_print inspect_sharding check",
        "shape_assertion dim_as_value dimension_size platform_index lu_pivots_to_permutation",
        # A reference has the dtype that its maker gave it, and so has all that goes in or out; the
        # rest of these stands in kernels only.
        "get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze masked_load",
        "masked_swap get_global pin unpin multiple_of program_id num_programs delay unreachable",
        "semaphore_read semaphore_signal semaphore_wait run_scoped run_state core_map",
        # They hold functions, or types, that cannot be traced again with other dtypes.
        "custom_lin custom_jvp_call_jaxpr custom_vmap_call linear_call create_linear",
        "call_exported call_hi_primitive call_hi_primitive_linearized jaxpr_call remat_opt",
        "dce_sink stage tie to_edtype from_edtype new_box box_get box_set new_log log_extend",
        "log_read xla_metadata_call xla_metadata_value",
        # Collectives in two halves, a start and an end, which must agree.
        "psend precv psum_start psum_done psum_invariant_start ppermute_start ppermute_done",
        "all_gather_start all_gather_done all_gather_reduced_start all_to_all_start",
        "all_to_all_done reduce_scatter_start reduce_scatter_done pbroadcast_start",
        "pbroadcast_done pbroadcast_dynamic unreduced_psum_start",
        "unreduced_reduce_scatter_start",
    )
)
DEFAULTS: MappingProxyType[str, Precision] = MappingProxyType(
    {
        name: precision
        for precision, names in (
            ("opaque", _OPAQUE),
            ("half", _HALF),
            ("float32", _FLOAT32),
            ("widest", _WIDEST),
            ("pass", _PASS),
            ("recurse", _RECURSE),
        )
        for name in names.split()
    }
)
HALF_BY_DEFAULT = frozenset(_HALF.split())
# The libraries or jaxprs behind them have no half, so that a user's rule cannot ask for it.
WITHOUT_HALF_FORM = frozenset(
    """reduce reduce_window select_and_gather_add igamma_grad_a custom_linear_solve linear_solve
    fft cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig eigh schur
    hessenberg triangular_solve tridiagonal tridiagonal_solve symmetric_product""".split()
)
# They hold functions of the user's that autocast cannot rewrite. To leave these in float32 is safe,
# but costs the speed that autocast is for, so there is a warning.
HIDING_FUNCTIONS = frozenset(
    """call_hi_primitive call_hi_primitive_linearized jaxpr_call remat_opt xla_metadata_call
    custom_vmap_call linear_call custom_partitioning composite""".split()
)
# A smaller operand of these is broadcast over the other, as a bias or a scale is.
TAKING_BIAS_OR_SCALE = frozenset(("add", "sub", "mul", "div"))
# An array of zeros here is a place to sum into. Its float32 is the dtype of the sum.
ACCUMULATING = primitives.ADDING | {"scatter-add", "scatter-sub"}
# These choose among their operands. A constant that is too large for half may become the largest
# half number here: it is chosen or loses as before, and nothing is computed with it.
SELECTING = primitives.CHOOSING | {"pad", "concatenate", "scatter"}
# Each number of a result is one of an operand, perhaps with another sign: what is known of the
# magnitudes of the operands holds for the result.
PICKING = SELECTING | frozenset(
    """abs neg sort reduce_max reduce_min cummax cummin gather tile dynamic_update_slice""".split()
)
# How a constant is computed from constants, to see whether half can hold it.
CONSTANT_FOLDING: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "neg": np.negative,
        "max": np.maximum,
        "min": np.minimum,
        "pow": np.power,
        "square": np.square,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "exp": np.exp,
        "log": np.log,
    }
)
# They move an operand without computing on it: a parameter stays one. `tile` is left out, since its
# parameters are not read to see along which axes it repeats; what is tiled counts as computed.
MOVING = (
    primitives.REARRANGING - {"tile"}
    | primitives.IDENTITIES
    | primitives.PLACEMENTS
    | primitives.AXIS_TYPE_CASTS
    | {"convert_element_type", "device_put", "pbroadcast"}
)
# Forward they repeat numbers, so their transposes sum. They run in float32 and their results are
# narrowed: this makes the sums of the backward pass float32.
SUMMING_WHEN_TRANSPOSED = frozenset(("broadcast_in_dim", "broadcast_to", "tile", "gather"))
# Output i is operand i: summed over devices, moved, or waited for. Each keeps its own dtype.
ONE_TO_ONE = (
    primitives.ALL_REDUCTIONS
    | primitives.AXIS_TYPE_CASTS
    | {"ppermute", "pbroadcast", "all_to_all", "optimization_barrier", "device_put"}
)
