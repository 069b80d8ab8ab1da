"""The benchmark of float8 on a GPU, rehearsed on a CPU with small products."""

import jax
import numpy as np
import pytest

from benchmarks import float8

SECONDS = {
    "nvjet_qqtst_128x128_128x6_2x1_v_bz_TNT": 3.0,
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n": 2.0,
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": 4.0,  # of bfloat16
    "input_reduce_fusion_8": 1.0,
}


def test_kernels_in_float8_are_known_by_their_names():
    kernels = float8.Kernels(SECONDS)
    assert kernels.float8_share == 0.5
    assert kernels.longest[0] == "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"


@pytest.mark.whole
def test_the_table_has_a_row_for_each_recipe_and_programs_are_those_of_the_recipe(capsys):
    float8.main(["--sizes", "32", "--rounds", "1"])
    table = capsys.readouterr().out
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| 32")]
    assert [row[1] for row in rows] == [recipe or "bfloat16" for recipe in float8.RECIPES]
    assert all("`" in row[-1] for row in rows)  # the profile had instructions
    assert "This is no GPU" in table
    candidates = {each.name: each for each in float8.make_candidates(32)}
    exact = candidates["bfloat16"].run_once() or candidates["bfloat16"].state
    for name, least, most in (("rowwise", 0.01, 0.06), ("tensorwise", 0.01, 0.09)):
        candidates[name].run_once()
        for own, other in zip(*map(jax.tree.leaves, (candidates[name].state, exact)), strict=True):
            error = np.linalg.norm(own - other) / np.linalg.norm(other)
            assert least < error < most
