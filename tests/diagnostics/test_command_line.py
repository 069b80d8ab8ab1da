"""`python -m ampx`: the report on this machine, and the linter for a step that stands in a file."""

import re
import sys

import flax
import pytest

import ampx
from ampx.__main__ import main
from ampx.diagnostics import environment

# A step that forgets its loss scale, and what it is called with in three forms.
TRAIN = """
import dataclasses
import helper_of_train
import jax, jax.numpy as jnp, optax
import ampx

tx = ampx.dynamic_loss_scale(optax.sgd(0.1))

@dataclasses.dataclass
class Steps:
    scaled: bool

    def __call__(self, params, state, x):
        factor = ampx.current_loss_scale(state) if self.scaled else 1.0
        grads = jax.grad(lambda w: factor * helper_of_train.loss(w, x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

class runs:
    sound, step = Steps(True), Steps(False)

def example_args():
    params = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    return params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((8, 3), jnp.float32)

arguments = example_args()
number = 1
if __name__ == "__main__":
    raise AssertionError("training begins")
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper_of_train.py").write_text(
        "def loss(w, x):\n    return ((x @ w) ** 2).mean()\n"
    )
    yield f"{tmp_path}/train.py"
    sys.modules.pop("helper_of_train", None)


def test_doctor_lints_a_step_of_a_file(train, capsys):
    before = list(sys.path), set(sys.modules)
    assert main(["doctor", f"{train}:runs.step"]) == 1
    assert "train.py:17 (Steps.__call__)" in capsys.readouterr().out, "the line of the user's file"
    assert main(["doctor", f"{train}:runs.step", "--ignore", "loss_scale"]) == 0
    assert main(["doctor", f"{train}:runs.sound", "--args", "arguments"]) == 0
    assert capsys.readouterr().out == 2 * "Nothing found.\n"
    assert list(sys.path) == before[0] and "train" not in sys.modules


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["{}"], "give FILE:STEP, such as train.py:step"),
        (["nothing.py:step"], "there is no file 'nothing.py'"),
        (["nothing.here:step"], "there is no file and no module 'nothing.here'"),
        (["{}:run"], "has no 'run': did you mean 'runs'?"),
        (["{}:number"], "number in '{}' is no function but int"),
        (["{}:runs.step", "--args", "batch"], "    batch = .state, batch.\n"),
        (["{}:runs.step", "--args", "number"], "must be a tuple .* of runs.step, .* got int"),
        (["{}:runs.step", "--ignore", "scale"], "invalid choice: 'scale'"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value).replace("{}", "train.py"),
)
def test_doctor_says_what_is_missing(train, capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *(flag.format(train) for flag in flags)])
    assert stopped.value.code == 2
    assert re.search(said.format(train), capsys.readouterr().err)


@pytest.fixture
def package(train, tmp_path, monkeypatch):
    """The same file as a part of a package, which its relative import needs."""
    folder = tmp_path / "of_train" / "inner"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").touch()
    (folder.parent / "helper.py").write_text((tmp_path / "helper_of_train.py").read_text())
    text = TRAIN.replace("import helper_of_train", "from .. import helper as helper_of_train")
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("target", ["of_train/inner/train.py", "of_train.inner.train"])
def test_doctor_lints_a_step_of_a_package(package, capsys, target):
    before = list(sys.path)
    for _ in range(2):
        assert main(["doctor", f"{target}:runs.step"]) == 1
        assert "train.py:17 (Steps.__call__)" in capsys.readouterr().out
    assert sys.path == before and not any(name.startswith("of_train") for name in sys.modules)


def test_a_module_of_the_folder_will_do(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "train:runs.step"]) == 1


FAULTY = {
    "raises": "raise ValueError('of the user')",
    "syntax": "def of the user",
    "import": "import of_the_user_absent",
    "relative import": "from . import of_the_user",
    "trace": "step = lambda: [].of_the_user\nexample_args = ()",
    "arguments": "step = lambda of_the_user: 0\nexample_args = ()",
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_of_the_file_itself_are_shown_and_are_no_findings(name, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(FAULTY[name])
    assert main(["doctor", f"{tmp_path}/broken.py:step"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and re.search("of.the.user|no known parent package", shown)


PARSING = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--ignore", default=1.0)
example_args = (parser.parse_args().ignore, sys.argv)
def step(number, argv):
    assert (number, len(argv)) == (1.0, 1)
"""


def test_the_file_does_not_get_the_arguments_of_doctor(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ampx", "doctor", "parsing.py:step", "--ignore", "dtype"])
    file = tmp_path / "parsing.py"
    file.write_text(PARSING)
    assert main(["doctor", f"{file}:step", "--ignore", "dtype"]) == 0
    assert sys.argv[:2] == ["ampx", "doctor"]
    file.write_text(PARSING.replace("default=1.0", "required=True"))
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", f"{file}:step"])
    assert stopped.value.code == 2 and "ends the program" in capsys.readouterr().err


def test_the_report_tells_what_half_is_worth_here(monkeypatch, capsys):
    """XLA's CPU backend multiplies float16 in float32, and knows no product of float4_e2m1fn."""
    monkeypatch.setattr(environment, "_DTYPES", ("float32", "float16", "float4_e2m1fn"))
    absent = ("no-such", "no_such.inside", "nothing", "pip install no-such")
    monkeypatch.setattr(environment, "_OPTIONAL", (*environment._OPTIONAL[:1], absent))
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ampx {ampx.__version__}, jax ") and lines[0].endswith(
        sys.version.split()[0]
    )
    assert lines[2] == "Devices: 8 x cpu (backend 'cpu')"
    table = [line.split() for line in lines[6:9]]
    assert [row[1] for row in table] == ["f32", "f32", "refused"]
    assert "float16: converted to float32 first, which saves memory and no time." in lines
    assert "backend=\"pallas\": no kernels for 'cpu'" in "\n".join(lines)
    assert lines[-1].split() == ["no-such", "-", "nothing", "pip", "install", "no-such"]
    assert lines[-2].split()[:2] == ["flax", flax.__version__]
