"""A pipeline whose stages are in different processes, which really run, trains as in one."""

import jax
import numpy as np
import pytest
from pipeline_steps import LAYERS, make_params, placed
from process_workers import PIPELINE_BATCHES, make_pipeline_batch, make_pipeline_step
from processes import run_processes


def expected_training(name, data, stages):
    """The same in this process, on devices of its own."""
    step = make_pipeline_step(name, data, stages)
    state, run, losses = placed(step, make_params()), jax.jit(step), []
    for number in range(PIPELINE_BATCHES):
        state, report = run(state, make_pipeline_batch(number))
        losses.append(float(report.loss))
    return state.params, losses


@pytest.mark.whole
@pytest.mark.parametrize("name, data, stages", [("interleaved", 1, 2), ("1f1b", 2, 2)])
def test_processes_train_stages_as_one_process_does(name, data, stages):
    count = data * stages
    args = {"name": name, "data": data, "stages": stages}
    results = run_processes("pipeline", count, timeout=120, args=args)
    params, losses = expected_training(name, data, stages)
    for rank, result in enumerate(results):
        assert result["devices"].tolist() == [count, 1]
        # The last row is in one process, the last layer too: all of them skip.
        assert result["skips"].tolist() == [False, True, False]
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-6)
        first = rank % stages * LAYERS // stages
        assert set(result["first layer"].tolist()) == {first}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            found = result[jax.tree_util.keystr(path, simple=True, separator="/")]
            wanted = np.asarray(leaf)
            if path[0].key == "stages":
                wanted = wanted[first : first + LAYERS // stages]
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=str(path))
