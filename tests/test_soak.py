"""A sample of the soak test; `make soak` runs all of it."""

import pytest
import soak


@pytest.mark.whole_but("one device, fused adamw, O1, dynamic")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "one device, fused adamw, O1, dynamic",
        "one device, adamw, switches, dynamic",
        "Auto, clip, f32, dynamic",
        "Explicit, adamw, O2, dynamic",
        "vma, adamw, f32, strict",
        "zero1, no vma, lamb, O1, tolerant",
        "zero-bubble, fused adamw, O2, dynamic",
    ],
)
def test_faults_leave_no_trace(name):
    count = soak.soak(name, faults=60, seed=1)
    assert count.faults == 60 and count.overflows >= 20 and count.states
