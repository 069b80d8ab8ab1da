"""Which precision each primitive runs in, by default.

The lists follow Apex's `lists/torch_overrides.py` and torch's autocast op lists, mapped from
functions to the primitives that JAX makes of them. A primitive that is in no list is opaque: it
gets the dtypes that it was traced with.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from ampx.jaxprs import primitives

Precision = Literal["half", "float32", "widest", "pass", "recurse", "opaque", "banned"]
_HALF = "dot_general conv_general_dilated ragged_dot_general"
# Overflow, cancel or lose their small results in half. Sums are here because half additions
# swallow small terms; roots, powers and quotients of 1 because their range leaves float16.
_FLOAT32 = """
    exp exp2 expm1 log log1p log2 pow polynomial rsqrt sqrt cbrt reciprocal
    tan sinh cosh asin acos asinh acosh atanh erf_inv
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
    bessel_i0e bessel_i1e
    reduce_sum reduce_prod reduce reduce_window reduce_window_sum
    cumsum cumprod cumlogsumexp select_and_gather_add
    fft cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig eigh schur
    hessenberg triangular_solve tridiagonal tridiagonal_solve symmetric_product
    custom_linear_solve
"""
# Several operands that must agree.
_WIDEST = """
    add add_any sub mul div rem max min atan2 clamp select_n
    concatenate stack pad dynamic_update_slice
    scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max
    select_and_scatter select_and_scatter_add
    eq ne lt le gt ge eq_to lt_to le_to
"""
# One operand that matters: the result has its dtype.
_PASS = """
    abs neg sign floor ceil round is_finite tanh logistic erf erfc sin cos atan
    square integer_pow one_minus_square
    broadcast_in_dim broadcast_to reshape transpose squeeze rev slice dynamic_slice gather tile
    split unstack copy name stop_gradient
    reduce_max reduce_min argmax argmin reduce_window_max reduce_window_min cummax cummin
    sort top_k approx_top_k
    convert_element_type
    psum psum_invariant pmax pmin ppermute pbroadcast all_gather all_gather_invariant
    all_gather_reduced all_to_all reduce_scatter ragged_all_to_all preduced
    unreduced_psum unreduced_reduce_scatter unreduced_pmax unreduced_pmin
    pvary pcast reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p
    sharding_constraint layout_constraint relayout reshard device_put with_memory_space_constraint
    optimization_barrier
"""
_RECURSE = " ".join(
    primitives.CALLS
    | primitives.CUSTOM_RULES
    | primitives.LOOPS
    | {"cond", "eval_jaxpr", "shard_map"}
)
# Bit patterns, other people's kernels, random numbers, host calls, references, complex numbers,
# integers, tokens: what they get and give is part of their meaning.
_OPAQUE = """
    bitcast_convert_type reduce_precision nextafter clz population_count mulhi not and or xor
    shift_left shift_right_arithmetic shift_right_logical reduce_and reduce_or reduce_xor
    real imag complex conj iota empty empty2 zeros_like create_token after_all axis_index
    random_bits random_seed random_split random_fold_in random_gamma random_wrap random_unwrap
    random_clone rng_bit_generator rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32
    iota_2x32_shape
    pallas_call mpmd_map ffi_call cudnn_fusion custom_partitioning composite scaled_dot
    scaled_matmul scaled_matmul_wrapper
    dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper
    pure_callback io_callback debug_callback debug_print inspect_sharding check
    shape_assertion dim_as_value dimension_size platform_index lu_pivots_to_permutation
    get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze masked_load masked_swap
    get_global pin unpin multiple_of program_id num_programs delay unreachable
    semaphore_read semaphore_signal semaphore_wait run_scoped run_state core_map
    custom_lin custom_jvp_call_jaxpr custom_vmap_call linear_call create_linear call_exported
    call_hi_primitive call_hi_primitive_linearized jaxpr_call remat_opt dce_sink stage tie
    to_edtype from_edtype new_box box_get box_set new_log log_extend log_read
    psend precv psum_start psum_done psum_invariant_start ppermute_start ppermute_done
    all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done
    reduce_scatter_start reduce_scatter_done pbroadcast_start pbroadcast_done pbroadcast_dynamic
    unreduced_psum_start unreduced_reduce_scatter_start xla_metadata_call xla_metadata_value
"""
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
# Libraries or bodies behind them know no half, whatever a rule says.
WITHOUT_HALF_FORM = frozenset(
    """reduce reduce_window select_and_gather_add igamma_grad_a custom_linear_solve fft cholesky
    cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig eigh schur hessenberg
    triangular_solve tridiagonal tridiagonal_solve symmetric_product""".split()
)
# They hold functions that autocast cannot rewrite. To leave them float32 is safe, but must be said.
CLOSED_BOOKS = frozenset(
    """call_hi_primitive call_hi_primitive_linearized jaxpr_call remat_opt xla_metadata_call
    custom_vmap_call linear_call custom_partitioning composite""".split()
)
# A smaller operand of these is spread over the other, as a bias or a scale is.
SPREADING = frozenset(("add", "sub", "mul", "div"))
# A constant array here is a place to sum into, whose dtype is the point of it.
ACCUMULATING = primitives.ADDING | {"scatter-add", "scatter-sub"}
# These pick among their operands, so a constant that is too large may become the largest one.
SELECTING = primitives.CHOOSING | {"pad", "concatenate", "scatter"}
# Each number of a result is one of an operand, but for its sign.
PICKING = SELECTING | frozenset(
    """abs neg sort reduce_max reduce_min cummax cummin gather tile dynamic_update_slice""".split()
)
# What constants make of constants is a constant.
FOLDED: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
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
# Move one operand without computing on it: a parameter stays one. Of a tile it is not read along
# which axes it repeats, so what is tiled counts as computed.
MOVING = (
    primitives.REARRANGING - {"tile"}
    | primitives.IDENTITIES
    | primitives.PLACEMENTS
    | primitives.AXIS_TYPE_CASTS
    | {"convert_element_type", "device_put", "pbroadcast"}
)
# Their transposes sum: in float32 that neither overflows nor swallows small terms.
SUMMING_WHEN_TRANSPOSED = frozenset(("broadcast_in_dim", "broadcast_to", "tile", "gather"))
# Output i is operand i, reduced, moved or waited for.
ONE_TO_ONE = (
    primitives.ALL_REDUCTIONS
    | primitives.AXIS_TYPE_CASTS
    | {"ppermute", "pbroadcast", "all_to_all", "optimization_barrier", "device_put"}
)
