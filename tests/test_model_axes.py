"""`model_axes`: the one setting that says over which axes parameters are divided."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ampx.model_axes import add_over_shards, as_model_axes, axes_of_leaves

TREE = {"dense": P(None, "model"), "norm": None, "experts": [P(("expert", "model")), "expert"]}


@pytest.mark.parametrize(
    ("value", "path", "axes"),
    [
        (None, "a", ()),
        ((), "a", ()),
        ("model", "a/b", ("model",)),
        (["model", "expert"], "a", ("model", "expert")),
        (P(None, "model"), "a", ("model",)),
        (TREE, "dense/kernel", ("model",)),
        (TREE, "norm/scale", ()),
        (TREE, "experts/0", ("expert", "model")),
        (TREE, "experts/1/kernel", ("expert",)),
    ],
)
def test_each_leaf_has_the_axes_of_its_entry(value, path, axes):
    setting = as_model_axes(value)
    assert setting.of_path(path) == axes
    assert as_model_axes(setting) is setting and isinstance(hash(setting), int)


def test_the_names_are_those_of_all_entries():
    assert as_model_axes(TREE).names == ("expert", "model")


def test_a_part_of_the_parameters_has_its_part_of_the_setting():
    experts = as_model_axes(TREE).below("experts")
    assert experts.of_path("0") == ("expert", "model") and experts.of_path("1") == ("expert",)
    assert as_model_axes(TREE).below("dense").of_path("") == ("model",)
    assert as_model_axes("model").below("dense").of_path("kernel") == ("model",)


def test_a_parameter_that_the_tree_does_not_reach_is_named():
    with pytest.raises(ValueError, match="model_axes names no axes for the parameter 'densest/w'"):
        as_model_axes(TREE).of_path("densest/w")


@pytest.mark.parametrize("value", [3, {"dense": 3}, {"dense": P(P.UNCONSTRAINED)}], ids=repr)
def test_what_names_no_axis_is_refused(value):
    with pytest.raises(TypeError, match="model_axes must be"):
        as_model_axes(value)


def test_an_axis_that_is_not_mapped_is_refused():
    with pytest.raises(NameError, match="no axis 'model' is mapped here"):
        axes_of_leaves(jnp.ones(2), as_model_axes("model"))


def test_shards_are_added_and_replicas_are_not():
    # In `vmap` types say nothing, as under check_vma=False.
    def total(shard):
        tree = {"shard": shard, "replica": jnp.float32(100)}
        axes = axes_of_leaves(tree, as_model_axes({"shard": "model", "replica": None}))
        assert axes == [(), ("model",)]
        return add_over_shards(jax.tree.leaves(tree), axes)

    assert jax.vmap(total, axis_name="model")(jnp.array([1.0, 2.0])).tolist() == [103, 103]
