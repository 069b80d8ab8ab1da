"""Saved states: those of each format restore and go on, and others are refused by name."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
import stored_states
from flax import serialization
from helpers import assert_bit_equal

import ampx
from ampx.training import state_formats
from ampx.updates import devices

STORED = {
    number: json.loads(stored_states.file_of(number).read_text())
    for number in range(1, state_formats.FORMAT + 1)
}
FORMATS = STORED[state_formats.FORMAT]["formats"]
EARLIER = [number for number in STORED if number < state_formats.FORMAT]
P = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def stored(name, when, like):
    return stored_states.from_arrays(STORED[state_formats.FORMAT]["states"][name][when], like)


@pytest.mark.slow_but("loss_scale", "multi_steps", "stochastic_rounding", "train_step")
@pytest.mark.parametrize("name", stored_states.CASES)
def test_a_stored_state_restores_and_goes_on_bit_for_bit(name):
    like = stored_states.init(name)
    ampx.check_state_format(FORMATS[name], like)
    state = stored(name, "before", like)
    found = stored_states.take_steps(name, state, stored_states.GRADIENTS[3:])
    assert_bit_equal(found, stored(name, "after", like))


@pytest.mark.parametrize("number", EARLIER)
@pytest.mark.parametrize("name", stored_states.CASES)
def test_a_state_of_an_earlier_format_is_upgraded(number, name):
    like = stored_states.init(name)
    with pytest.raises(ValueError, match=rf"format {number} .*pass these .* to ampx.upgrade_state"):
        ampx.check_state_format(STORED[number]["formats"][name], like)
    earlier = STORED[number]["states"][name]["before"]
    restored = stored_states.as_dicts(earlier, like)
    state = ampx.upgrade_state(restored, like)
    ampx.check_state_format(FORMATS[name], state)
    # From there it goes on as every state of today's format does: the test above.
    assert_bit_equal(state, stored(name, "before", like))


def test_only_what_a_format_has_added_may_be_missing():
    params = {"ceiling_hits": jnp.ones(2), "b": jnp.ones(3)}
    state = ampx.dynamic_loss_scale(optax.trace(0.9)).init(params)
    saved = serialization.to_state_dict(state)
    trace = saved["inner_state"]["trace"]
    for broken, said in (
        ({**saved, "inner_state": {"trace": {"b": trace["b"]}}}, "ceiling_hits' is not there and"),
        ({**saved, "more": trace["b"]}, r"'more' is float32\[3\] and not there"),
        ({**saved, "overflow": jnp.int32(0)}, r"'overflow' is int32\[\] and bool\[\]"),
    ):
        with pytest.raises(ValueError, match=said):
            ampx.upgrade_state(broken, state)
    del saved["ceiling_hits"]
    ampx.upgrade_state(saved, state)


def test_the_stored_states_are_all_classes_of_states():
    """A class that is in no stored state could change without a word."""
    saved = " ".join(form["optimizer"] for form in FORMATS.values())
    classes = [
        name
        for module in (ampx, ampx.fused)
        for name in module.__all__
        if name.endswith("State") and name not in ("TrainState", "ReductionState", "Zero1State")
    ]
    assert len(classes) > 5
    assert not [name for name in classes if name not in saved]


def test_a_format_goes_through_json_and_shapes():
    state = ampx.train_step(lambda w, x: jnp.sum(w), optax.adam(0.1)).init(jnp.ones(2))
    saved = json.loads(json.dumps(ampx.state_format(state)))
    assert saved["format"] == state_formats.FORMAT
    assert saved["leaves"]["opt_state/0/mu"] == "float32[2]"
    ampx.check_state_format(saved, jax.eval_shape(lambda: state))


def reduced(**settings):
    return optax.chain(ampx.all_reduce("data", **settings), optax.adam(0.1))


@pytest.mark.parametrize(
    "txs",
    [
        (optax.adamw(0.1), ampx.fused.fuse(optax.adamw(0.1))),
        (optax.sgd(0.1), ampx.fused.fuse(optax.sgd(0.1))),
        tuple(reduced(tail_overlap=overlap) for overlap in (None, True, False)),
        *(
            (getattr(optax, name)(0.1), getattr(ampx.fused, name)(0.1))
            for name in ("sgd", "adam", "adamw", "lamb", "adadelta", "lion", "adagrad", "novograd")
        ),
    ],
    ids=lambda txs: None,
)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_state_with_the_same_leaves_is_of_the_same_format(txs, platform, monkeypatch):
    """Whatever the device: what a CPU has saved a GPU reads."""
    saved = [ampx.state_format(tx.init(P)) for tx in txs]
    monkeypatch.setattr(devices, "find_device", lambda: (platform, ""))
    for tx in txs:
        for form in saved:
            ampx.check_state_format(form, tx.init(P))
    assert type(reduced().init(P)[0]) is ampx.ReductionState


def other_format(saved):
    return {**saved, "format": 9}


def another_field(saved):
    leaves = dict(saved["leaves"])
    leaves["skipped_before"] = leaves.pop("skipped_total")
    return {**saved, "leaves": leaves}


OTHERS = {
    "format": (other_format, r"saved is a state of format 9 .*and this ampx .*format 2 \(ampx 0.1"),
    "field": (another_field, "'skipped_total' is not there and int32"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_format_is_refused_and_both_are_named(name):
    change, said = OTHERS[name]
    state = ampx.dynamic_loss_scale(optax.adam(0.1)).init(P)
    saved = ampx.state_format(state)
    ampx.check_state_format(saved, state)
    with pytest.raises(ValueError, match=said):
        ampx.check_state_format(change(saved), state)


@pytest.mark.parametrize(
    ("tx", "params", "said"),
    [
        (optax.sgd(0.1), P, r"LossScaleState\(\(ScaleByAdamState.* and state is that of"),
        (ampx.dynamic_loss_scale(optax.lion(0.1)), P, "ScaleByAdamState.*ScaleByLionState"),
        (
            ampx.dynamic_loss_scale(optax.adam(0.1)),
            {**P, "b": jnp.ones(4)},
            r"'inner_state/0/mu/b' is float32\[3\] and float32\[4\]",
        ),
        (ampx.dynamic_loss_scale(optax.adam(0.1)), {"w": P["w"]}, "mu/b' is .* and not there"),
    ],
    ids=["no scale", "another", "shape", "leaf"],
)
def test_the_state_of_another_optimizer_or_model_is_refused(tx, params, said):
    saved = ampx.state_format(ampx.dynamic_loss_scale(optax.adam(0.1)).init(P))
    with pytest.raises(ValueError, match=said):
        ampx.check_state_format(saved, tx.init(params))
