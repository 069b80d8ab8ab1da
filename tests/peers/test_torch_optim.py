"""`torch.optim` in float64 beside the optimizers of `ampx.fused` and of optax, under a loss scale.

Histories, settings and skipped steps are drawn at random. torch takes the good gradients alone;
ampx takes all of them, scaled, and has to skip the bad ones by itself. Parameters and moments must
then agree, up to the rounding of float64. torch has up to three programs for one optimizer, a loop,
`foreach` and `fused`, and each is asked.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import run_steps
from hypothesis import given
from listing import Peer

import ampx

torch = pytest.importorskip("torch")

STEPS = 8
START = {"a": np.array([1.0, -2.0, 0.5]), "b": np.array([[0.25, 3.0], [-1.0, 0.1]])}
RATES, DECAYS = (0.1, 0.01), (0.0, 0.1)
BETAS = {"b1": (0.9, 0.5), "b2": (0.999, 0.7)}


class Case(NamedTuple):
    """An optimizer of torch, and how ampx or optax write it.

    Attributes:
      kind: the name of torch's class.
      numbers: settings by our names, with the choices for each. They are traced: one compilation.
      theirs: from the numbers to the arguments of torch's class.
      ours: from the module (`optax` or `ampx.fused`) and the numbers to the transformation.
      moments: from torch's name of a moment to ours.
      is_fused: whether `ampx.fused` has it.
      also: further arguments of torch's class, which take a program of their own.
      rtol: some hundred roundings of float64, of numbers that are at most some ten times larger.
    """

    kind: str
    numbers: Mapping[str, tuple[float, ...]]
    theirs: Callable[..., dict[str, Any]]
    ours: Callable[..., optax.GradientTransformation]
    moments: Mapping[str, str]
    is_fused: bool = False
    also: tuple[tuple[str, Any], ...] = ()
    rtol: float = 1e-12


def with_penalty(make: Callable) -> Callable:
    """torch's coupled weight decay: a part of the gradient, before everything else."""

    def of(module: Any, *, weight_decay: Any, **numbers: Any) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(weight_decay), make(module, **numbers))

    return of


def adam_arguments(*, lr: float, b1: float, b2: float, eps: float, weight_decay: float) -> dict:
    return {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": weight_decay}


ADAM_NUMBERS = {"lr": RATES, **BETAS, "eps": (1e-8, 1e-2), "weight_decay": DECAYS}
ADAM_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


def sgd(kind: str = "SGD", momentum: bool = True, nesterov: bool = False, **also: Any) -> Case:
    numbers = {"lr": RATES, "weight_decay": DECAYS}
    return Case(
        kind,
        {**numbers, "momentum": (0.9, 0.5)} if momentum else numbers,
        dict,
        with_penalty(lambda module, lr, momentum=None: module.sgd(lr, momentum, nesterov=nesterov)),
        {"momentum_buffer": "trace"} if momentum else {},
        is_fused=True,
        also=tuple({"nesterov": nesterov, **also}.items()),
    )


def adam(kind: str = "Adam", decoupled: bool = False, nesterov: bool = False, **also: Any) -> Case:
    if decoupled:

        def ours(module, *, lr, b1, b2, eps, weight_decay):
            return module.adamw(lr, b1, b2, eps, weight_decay=weight_decay, nesterov=nesterov)

    else:
        ours = with_penalty(
            lambda module, lr, b1, b2, eps: module.adam(lr, b1, b2, eps, nesterov=nesterov)
        )
    return Case(kind, ADAM_NUMBERS, adam_arguments, ours, ADAM_MOMENTS, True, tuple(also.items()))


def adagrad(eps: float = 0.0, lr_decay: float = 0.1) -> Case:
    def ours(module, *, lr, initial):
        # torch divides the rate by 1 + t * lr_decay; optax and ampx take that as a schedule.
        return module.adagrad(lambda step: lr / (1 + lr_decay * step), initial, eps)

    return Case(
        "Adagrad",
        {"lr": RATES, "initial": (0.1, 1.0), "weight_decay": DECAYS},
        lambda initial, **numbers: {"initial_accumulator_value": initial, **numbers},
        with_penalty(ours),
        {"sum": "sum_of_squares"},
        is_fused=True,
        also=(("eps", eps), ("lr_decay", lr_decay)),
    )


def rmsprop(centered: bool, momentum: bool) -> Case:
    def ours(module, lr, decay, eps, momentum=None):
        return module.rmsprop(
            lr, decay, eps, eps_in_sqrt=False, centered=centered, momentum=momentum
        )

    numbers = {"lr": RATES, "decay": (0.99, 0.5), "eps": (1e-8, 1e-2), "weight_decay": DECAYS}
    return Case(
        "RMSprop",
        {**numbers, "momentum": (0.9, 0.5)} if momentum else numbers,
        lambda decay, **numbers: {"alpha": decay, **numbers},
        with_penalty(ours),
        {"square_avg": "nu"},
        also=(("centered", centered),),
    )


def radam(eps: float, decoupled: bool = False) -> Case:
    def ours(module, *, lr, b1, b2, weight_decay):
        parts = module.scale_by_radam(b1, b2, eps), optax.add_decayed_weights(weight_decay)
        return optax.chain(*(parts if decoupled else parts[::-1]), optax.scale_by_learning_rate(lr))

    return Case(
        "RAdam",
        {name: choices for name, choices in ADAM_NUMBERS.items() if name != "eps"},
        functools.partial(adam_arguments, eps=eps),
        ours,
        ADAM_MOMENTS,
        also=(("decoupled_weight_decay", decoupled),),
    )


def adafactor() -> Case:
    def ours(module, *, lr, weight_decay):
        return module.adafactor(
            lambda step: jnp.minimum(lr, (step + 1.0) ** -0.5),
            min_dim_size_to_factor=2,
            clipping_threshold=1.0,
            weight_decay_rate=lr * weight_decay,
        )

    # torch bounds the root of the second moment, optax adds the square of that to it.
    return Case(
        "Adafactor",
        {"lr": (0.1, 2.0), "weight_decay": DECAYS},
        dict,
        ours,
        {},
        also=(("d", 1.0), ("eps", (1e-15, 1e-3)), ("beta2_decay", -0.8)),
        rtol=1e-6,  # optax computes the decay in float32
    )


CASES = {
    "SGD": sgd(momentum=False),
    "SGD momentum": sgd(),
    "SGD nesterov": sgd(nesterov=True),
    "SGD dampening": sgd(dampening=0.5),
    "Adam": adam(),
    "Adam decoupled_weight_decay": adam(decoupled=True, decoupled_weight_decay=True),
    "Adam amsgrad": adam(amsgrad=True)._replace(
        ours=with_penalty(lambda module, lr, b1, b2, eps: optax.amsgrad(lr, b1, b2, eps))
    ),
    "AdamW": adam("AdamW", decoupled=True),
    "AdamW amsgrad": adam("AdamW", amsgrad=True)._replace(
        ours=lambda module, lr, b1, b2, eps, weight_decay: optax.chain(
            optax.scale_by_amsgrad(b1, b2, eps),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(lr),
        ),
    ),
    # At this decay torch's momentum is b1 from the first step on, as in the paper.
    "NAdam of constant momentum": adam("NAdam", nesterov=True, momentum_decay=1e6),
    "NAdam of constant momentum, decoupled": adam(
        "NAdam", decoupled=True, nesterov=True, momentum_decay=1e6, decoupled_weight_decay=True
    ),
    "NAdam": adam("NAdam", nesterov=True),
    "Adamax": Case(
        "Adamax",
        ADAM_NUMBERS,
        adam_arguments,
        with_penalty(lambda module, lr, b1, b2, eps: module.adamax(lr, b1, b2, eps)),
        {"exp_avg": "mu", "exp_inf": "nu"},
    ),
    "RAdam of a tiny eps": radam(1e-30),
    "RAdam of a tiny eps, decoupled": radam(1e-30, decoupled=True),
    "RAdam": radam(1e-2),
    "Adafactor": adafactor(),
    "Adagrad without eps": adagrad(),
    "Adagrad": adagrad(eps=1e-2),
    "Adadelta": Case(
        "Adadelta",
        {"lr": (1.0, 0.1), "rho": (0.9, 0.5), "eps": (1e-6, 1e-2), "weight_decay": DECAYS},
        dict,
        lambda module, lr, rho, eps, weight_decay: module.adadelta(lr, rho, eps, weight_decay),
        {"square_avg": "e_g", "acc_delta": "e_x"},
        is_fused=True,
    ),
    "RMSprop": rmsprop(centered=False, momentum=False),
    "RMSprop momentum": rmsprop(centered=False, momentum=True),
    "RMSprop centered": rmsprop(centered=True, momentum=True),
    "Rprop": Case(
        "Rprop",
        {"lr": RATES},
        dict,
        lambda module, lr: optax.rprop(lr),
        {},
    ),
}
# Another definition: the case is run, and must differ.
EXCLUDED = {
    "SGD dampening": "torch weighs every gradient but the first by 1 - dampening; optax has none",
    **dict.fromkeys(
        ("Adam amsgrad", "AdamW amsgrad"),
        "torch takes the largest second moment, optax the largest corrected one",
    ),
    "NAdam": "torch's momentum grows over thousands of steps, by momentum_decay; that of optax and "
    "ampx is constant, as in the paper",
    "RAdam": "torch adds eps to the root before the bias correction, optax after it",
    "Adagrad": "torch adds eps to the root, optax and ampx add it under the root",
    "Rprop": "optax.rprop returns the update of the step before: its first step moves nothing",
}
# torch's classes that optax and ampx have no counterpart of.
WITHOUT = {
    "ASGD": "an average of the parameters beside them, and a rate of its own; for the average see "
    "optax.ema",
    "LBFGS": "it calls a closure several times a step; optax.lbfgs has another line search",
    "Muon": "it makes matrices orthogonal in bfloat16, optax.contrib.muon in their own dtype",
    "SparseAdam": "it updates the moments of those rows alone that have a gradient",
}
PEERS = (
    Peer(
        source="torch",
        runs="`torch.optim` in float64 over random gradients and settings: each optimizer against "
        "`ampx.fused` and optax under a loss scale, with steps that are skipped",
        cases=lambda: [*CASES, "parameter groups", *WITHOUT],
        excluded={**EXCLUDED, **WITHOUT},
    ),
)
# Settings that no case varies: they are optax.rprop's too, which differs as a whole.
NOT_GIVEN = {"Rprop": {"etas", "step_sizes"}}


def run_theirs(case: Case, settings: dict, grads: list[dict[str, np.ndarray]]) -> dict:
    """Parameters and moments after the steps of `grads`."""
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in START.items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # that of the counts and products that torch keeps
    try:
        made = getattr(torch.optim, case.kind)(list(params.values()), **settings)
        for own in grads:
            for name, param in params.items():
                param.grad = torch.tensor(own[name])
            made.step()
    finally:
        torch.set_default_dtype(default)
    states = {name: made.state.get(param, {}) for name, param in params.items()}
    return {
        "params": {name: param.detach().numpy() for name, param in params.items()},
        **{
            ours: {
                name: state[key].numpy() if key in state else np.zeros_like(START[name])
                for name, state in states.items()
            }
            for key, ours in case.moments.items()
        },
    }


@functools.cache
def compiled(name: str, form: str) -> Callable:
    """Ours: from the numbers and all gradients to parameters, moments and which steps were bad."""
    case = CASES[name]
    module = ampx.fused if form == "fused" else optax

    @jax.jit
    def run(numbers, grads):
        inner = case.ours(module, **numbers)
        tx = ampx.dynamic_loss_scale(inner, init_scale=16.0, growth_interval=2)
        params = {name: jnp.asarray(array) for name, array in START.items()}

        def step(carry, own):
            params, state = carry
            scale = ampx.current_loss_scale(state).astype(jnp.float64)
            updates, state = tx.update(optax.tree.scale(scale, own), state, params)
            return (ampx.apply_updates(params, updates), state), ampx.is_skipped(state)

        with jax.numpy_dtype_promotion("standard"):  # optax's bias corrections mix their dtypes
            (params, state), skips = jax.lax.scan(step, (params, tx.init(params)), grads)
        moments = {own: optax.tree.get(state, own) for own in case.moments.values()}
        return {"params": params, **moments}, skips

    return run


def run_ours(name: str, form: str, numbers: dict, grads: list[dict]) -> tuple[dict, np.ndarray]:
    stacked = {key: np.stack([own[key] for own in grads]) for key in START}
    with jax.enable_x64(True):
        found, skips = compiled(name, form)(numbers, stacked)
        return jax.device_get(found), np.asarray(skips)


def make_grads(seed: int, bads: list[bool]) -> list[dict[str, np.ndarray]]:
    """Normal gradients, some exactly zero; a bad one has one infinity or NaN."""
    generator = np.random.default_rng(seed)
    grads = []
    for bad in bads:
        own = {name: generator.normal(size=array.shape) for name, array in START.items()}
        own["a"][generator.integers(3)] = 0
        if bad:
            own["b"][generator.integers(2)] = generator.choice([np.inf, -np.inf, np.nan])
        grads.append(own)
    return grads


def check(
    name: str, form: str, numbers: dict, implementation: dict, maximize: bool, grads: list
) -> None:
    case = CASES[name]
    good = [own for own in grads if all(np.all(np.isfinite(leaf)) for leaf in own.values())]
    settings = {**case.theirs(**numbers), **dict(case.also), **implementation}
    expected = run_theirs(case, {**settings, "maximize": maximize}, good)
    sign = -1 if maximize else 1
    signed = [{key: sign * leaf for key, leaf in own.items()} for own in grads]
    found, skips = run_ours(name, form, numbers, signed)
    assert int(np.sum(skips)) == len(grads) - len(good)
    for key, arrays in expected.items():
        for leaf, array in arrays.items():
            np.testing.assert_allclose(
                found[key][leaf], array, rtol=case.rtol, atol=1e-13, err_msg=f"{key} of {leaf}"
            )


def implementations_of(name: str) -> list[dict[str, bool]]:
    """The programs that torch has for an optimizer."""
    taken = inspect.signature(getattr(torch.optim, CASES[name].kind)).parameters
    return [{}, *({way: True} for way in ("foreach", "fused") if way in taken)]


def forms_of(name: str) -> list[str]:
    return ["optax", "fused"] if CASES[name].is_fused else ["optax"]


INCLUDED = [(name, form) for name in CASES if name not in EXCLUDED for form in forms_of(name)]


@pytest.mark.parametrize(("name", "form"), INCLUDED)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), maximize=st.booleans())
def test_torch_optimizers_over_histories(name, form, data, seed, maximize):
    bads = data.draw(
        st.lists(st.sampled_from([False] * 3 + [True]), min_size=STEPS, max_size=STEPS)
    )
    choices = {key: st.sampled_from(of) for key, of in CASES[name].numbers.items()}
    numbers = data.draw(st.fixed_dictionaries(choices))
    implementation = data.draw(st.sampled_from(implementations_of(name)))
    check(name, form, numbers, implementation, maximize, make_grads(seed, bads))


@pytest.mark.parametrize("name", EXCLUDED)
def test_torch_optimizers_that_differ(name):
    numbers = {key: choices[0] for key, choices in CASES[name].numbers.items()}
    for form in forms_of(name):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(name, form, numbers, {}, False, make_grads(0, [False] * STEPS))


GROUPS = {"a": {"lr": 0.1, "weight_decay": 0.0}, "b": {"lr": 0.01, "weight_decay": 0.1}}


@pytest.mark.parametrize("form", ["optax", "fused"])
def test_torch_param_groups(form):
    """Each group has its own rate and decay; the scale and the verdict are of all."""
    grads = make_grads(0, [False, True] + [False] * 3)
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in START.items()}
    groups = [{"params": [param], **GROUPS[name]} for name, param in params.items()]
    theirs = torch.optim.AdamW(groups)
    for own in grads[:1] + grads[2:]:
        for name, param in params.items():
            param.grad = torch.tensor(own[name])
        theirs.step()
    module = ampx.fused if form == "fused" else optax
    made = {
        name: module.adamw(own["lr"], weight_decay=own["weight_decay"])
        for name, own in GROUPS.items()
    }
    tx = ampx.dynamic_loss_scale(optax.partition(made, {"a": "a", "b": "b"}), init_scale=16.0)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found, _ = run_steps(tx, jax.tree.map(jnp.asarray, START), grads)
        found = jax.device_get(found)
    for name, param in params.items():
        np.testing.assert_allclose(found[name], param.detach().numpy(), rtol=1e-12)


def test_every_optimizer_of_torch_is_named():
    found = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert found == {case.kind for case in CASES.values()} | set(WITHOUT)


def test_every_setting_of_torch_is_given():
    """But those that choose one of torch's programs; `maximize` is given to all."""
    programs = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}
    given_of: dict[str, set[str]] = {}
    for case in CASES.values():
        numbers = {key: choices[0] for key, choices in case.numbers.items()}
        given_of.setdefault(case.kind, set()).update(case.theirs(**numbers), dict(case.also))
    for kind, names in given_of.items():
        expected = set(inspect.signature(getattr(torch.optim, kind)).parameters) - programs
        assert expected - names == NOT_GIVEN.get(kind, set()), kind
