"""`ampx.read_deepspeed_config`: each key means what it means there, or is refused."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bit_equal, make_mesh, scan_flags

import ampx
from ampx.data_parallel.zero1 import Zero1State

P = jax.sharding.PartitionSpec
SGD = optax.sgd(0.1)
OFF = {"gradient_clipping": 0}


def read(config, tx=SGD, **options):
    return ampx.read_deepspeed_config({**OFF, **config}, tx, **options)


class ModelOfDeepSpeedsScale:
    """The dynamic scale as DeepSpeed's manual describes it, with the defaults of its config.

    It counts steps since the last overflow, where ampx counts good steps in a row.
    """

    def __init__(self, power=16, window=1000, hysteresis=2, lowest=1, in_a_row=False):
        self.scale, self.window, self.lowest, self.in_a_row = 2.0**power, window, lowest, in_a_row
        self.full = self.left = hysteresis
        self.step, self.last_overflow, self.ended = 0, -1, False

    def advance(self, overflow):
        since = self.step - self.last_overflow
        self.step += 1
        if overflow:
            self.last_overflow = self.step - 1
            if self.left > 1:
                self.left -= 1
            else:
                self.ended = self.ended or self.scale == self.lowest
                self.scale = max(self.scale / 2, self.lowest)
            return
        grows = since % self.window == 0
        if grows:
            self.scale *= 2
        if grows or self.in_a_row:
            self.left = self.full


# Shares of overflows in a stretch that lets the scale grow and in one that takes it to its floor.
@pytest.mark.slow_but("defaults")
@pytest.mark.parametrize(
    ("config", "model", "shares"),
    [
        pytest.param({}, {}, (0.0004, 0.5), id="defaults"),
        pytest.param(
            {"hysteresis": 3, "loss_scale_window": 4, "consecutive_hysteresis": True},
            {"hysteresis": 3, "window": 4, "in_a_row": True},
            (0.4, 0.9),  # up to 2**33, beyond the default bound of ampx
            id="consecutive",
        ),
        pytest.param(
            {"hysteresis": 1, "loss_scale_window": 3, "initial_scale_power": 5}
            | {"min_loss_scale": 2**-10},
            {"hysteresis": 1, "window": 3, "power": 5, "lowest": 2**-10},
            (0.4, 0.9),
            id="no hysteresis",
        ),
    ],
)
def test_the_scale_moves_as_deepspeeds(config, model, shares):
    draw = random.Random(0)
    overflows = [draw.random() < share for share in shares for _ in range(2500)]
    _, settings = read({"fp16": {"enabled": True, **config}})
    states = scan_flags(ampx.loss_scale(settings["loss_scale"], SGD), overflows)
    theirs, scales, ended = ModelOfDeepSpeedsScale(**model), [], []
    for overflow in overflows:
        theirs.advance(overflow)
        scales.append(theirs.scale)
        ended.append(theirs.ended)
    # Where their run ends, ours raises a flag, which stays up until somebody looks.
    np.testing.assert_array_equal(states.loss_scale, scales)
    np.testing.assert_array_equal(states.floor_flag, ended)
    grew, fell = np.diff(scales) > 0, np.diff(scales) < 0
    assert grew.sum() >= 2 and fell.sum() >= 10 and ended[-1] and max(scales) < 2.0**126


def test_sections_become_arguments_of_a_step():
    tx, settings = read(
        {
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 0, "overlap_comm": True, "reduce_bucket_size": "auto"},
            "train_batch_size": "auto",
            "wall_clock_breakdown": False,
            "prescale_gradients": False,
        }
    )
    assert tx is SGD
    recipe = settings.pop("policy")
    assert recipe == ampx.opt_level("O2", half_dtype="bfloat16", keep_norm_float32=False)
    assert settings == {
        "loss_scale": None,
        "max_grad_norm": 0.5,
        "num_microbatches": 4,
        "axis_name": None,
    }
    assert read({})[1]["policy"] is None
    assert read({"fp16": {"enabled": True, "loss_scale": 128}})[1]["loss_scale"] == 128.0


def loss_fn(params, batch):
    return jnp.mean((batch.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_on_two_devices_are_stage_0_on_one(stage):
    params = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)}
    batch = jnp.linspace(-2.0, 2.0, 32).reshape(8, 4)
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "gradient_clipping": 0.01,
        "gradient_accumulation_steps": 2,
    }
    results = []
    for own, axis in ((0, None), (stage, "data")):
        zero = {"zero_optimization": {"stage": own}}
        tx, settings = read({**config, **zero}, optax.adam(0.1), axis_name=axis)
        step = ampx.train_step(loss_fn, tx, **settings)
        state = step.init(params)
        if own:
            mesh = make_mesh((2,), ("data",))
            specs = ampx.TrainState(P(), P(), ampx.zero1_specs(step.tx, params, mesh), None, None)
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P())
            )
        step = jax.jit(step)
        for _ in range(3):
            state, report = step(state, batch)
        results.append((state.params["w"], report.global_norm))
    for one, two in zip(*results, strict=True):
        # Half gradients of four and of two rows at a time: sums of them differ in float16's step.
        np.testing.assert_allclose(one, two, rtol=2e-3)


def test_zero_clips_inside():
    config = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    tx, settings = read(config, optax.adam(0.1), axis_name="data")
    assert "max_grad_norm" not in settings and settings["axis_name"] == ("data",)
    state = tx.init(jnp.ones(2))
    assert isinstance(state, Zero1State)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    assert_bit_equal(state.inner_state, clipped.init(jnp.ones(2)))


REFUSED = {
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "'optimizer'.*give it as tx"),
    "scheduler": ({"scheduler": {}}, "'scheduler'.*learning_rate"),
    "dtype of sums": ({"data_types": {"grad_accum_dtype": "fp32"}}, "'data_types'.*in float32"),
    "checkpoints": ({"activation_checkpointing": {}}, "'activation_checkp.*jax.checkpoint around"),
    "pipeline": ({"pipeline": {"stages": 4}}, "'pipeline'.*ampx.pipelining"),
    "amp": ({"amp": {"enabled": True}}, "'amp'.*opt_level"),
    "both": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both 'fp16' and 'bf16'"),
    "auto": ({"fp16": {"enabled": "auto"}}, "'fp16'.*'enabled'.*='auto'.*write the value"),
    "a slip": ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
    "a slip inside": ({"fp16": {"loss_scal": 1}}, "'loss_scal'.*did you mean 'loss_scale'"),
    "auto_cast": ({"fp16": {"auto_cast": False}}, "'auto_cast'.*no batch is cast"),
    "half masters": ({"fp16": {"fp16_master_weights_and_grads": True}}, "master weights are float"),
    "a floor": ({"fp16": {"min_loss_scale": 1e-5}}, "'min_loss_scale'.*1e-05.*power of two"),
    "no floor": ({"fp16": {"min_loss_scale": 0}}, "'min_loss_scale'.*power of two"),
    "below it": ({"fp16": {"min_loss_scale": 8, "initial_scale_power": 2}}, r"outside \[3, 126\]"),
    "too large": ({"fp16": {"initial_scale_power": 127}}, "'initial_scale_power'.*=127"),
    "a fraction": ({"fp16": {"loss_scale": 0.5}}, "'loss_scale'.*got 0.5"),
    "hysteresis": ({"fp16": {"hysteresis": 0}}, "'hysteresis'.*got 0"),
    "a clip": ({"gradient_clipping": -1.0}, "'gradient_clipping'.*got -1.0"),
    "offload": ({"zero_optimization": {"offload_optimizer": {}}}, "'offload_optimizer'.*devices"),
    "stage 3": ({"zero_optimization": {"stage": 3}}, "'stage'.*=3.*shardings"),
    "no axis": ({"zero_optimization": {"stage": 1}}, "'stage'.*=1 needs axis_name"),
    "a sum in half": ({"fp32_allreduce": False}, "'fp32_allreduce'.*only True.*float32"),
    "sizes": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
        "'gradient_accumulation_steps'.*is missing.*number of its processes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_translated_is_refused_with_the_reason(name):
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read(config)


def test_a_missing_clip_is_refused_because_manual_and_code_differ():
    with pytest.raises(ValueError, match="'gradient_clipping'.*is missing.*1.0.*write the number"):
        ampx.read_deepspeed_config({}, SGD)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ds_config.json", "config must be a dict"),
        ({"fp16": True}, "'fp16'.*must be a dict"),
        ({"fp16": {"enabled": 1}}, "'enabled'.*must be"),
        ({"gradient_accumulation_steps": "4"}, "'gradient_accumulation_steps'.*int"),
    ],
)
def test_values_of_another_kind_are_refused(config, message):
    with pytest.raises(TypeError, match=message):
        ampx.read_deepspeed_config(config if isinstance(config, str) else {**OFF, **config}, SGD)


# Keys of the manual's sections on precision, batches, communication, ZeRO and logging, and others.
KEYS = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer "
    "scheduler fp32_allreduce communication_data_type prescale_gradients gradient_predivide_factor "
    "sparse_gradients fp16 bf16 bfloat16 amp gradient_clipping zero_optimization data_types "
    "zero_allow_untested_optimizer steps_per_print wall_clock_breakdown dump_state flops_profiler "
    "activation_checkpointing sparse_attention tensorboard wandb csv_monitor comms_logger "
    "compression_training data_efficiency curriculum_learning progressive_layer_drop eigenvalue "
    "quantize_training pipeline elasticity autotuning checkpoint torch_autocast seq_parallel"
).split()
LOGGING = (
    "train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer steps_per_print "
    "wall_clock_breakdown dump_state flops_profiler tensorboard wandb csv_monitor comms_logger"
).split()


@pytest.mark.parametrize("key", KEYS)
def test_no_key_is_passed_over_in_silence(key):
    value = object()  # no meaning anywhere: whoever reads it must refuse it
    if key in LOGGING:
        assert read({key: value})[1] == read({})[1]
    else:
        with pytest.raises((TypeError, ValueError), match=f"config\\['{key}'\\]"):
            read({key: value})
