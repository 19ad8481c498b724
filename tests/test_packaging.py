"""What a user installs: the wheel, the import without triton or a GPU, the public names."""

import os
import shutil
import subprocess
import sys
import types
import venv
import zipfile
from pathlib import Path

import pytest

import replayssm

ROOT = Path(__file__).parent.parent
GENERATE = ["generate", "def ", "--max-new-tokens", "8", "--seed", "0"]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``command`` outside the repository and without its PYTHONPATH; a failure shows what it printed."""
    # neither the repository nor the tests' way of running kernels
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a build folder behind and would reuse it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("replayssm", "models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of an environment that holds the wheel, and sees torch but no editable install."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=os.name != "nt")
    bin_folder = folder / ("Scripts" if os.name == "nt" else "bin")
    python = bin_folder / "python"
    flags = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *flags, wheel, cwd=folder)
    (site,) = folder.glob("[Ll]ib/**/site-packages")
    # A path named in a .pth file comes after the environment's own packages, and its own .pth files (the hook of an
    # editable install among them) are not read.
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "outer.pth").write_text("\n".join(outer))
    return bin_folder


def test_the_wheel_holds_every_source_file_and_the_bundled_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "replayssm").rglob("*.py")}
    sources |= {f"replayssm/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "models").rglob("*.py")}
    data = {path.name for path in (ROOT / "models/tiny").iterdir()}
    assert data >= {"config.json", "model.safetensors", "mtp.safetensors", "README.md"}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "replayssm/bench/results").glob("*.json")}
    expected = sources | {"replayssm/py.typed"} | {f"replayssm/models/tiny/{name}" for name in data}
    assert expected == {name for name in names if ".dist-info/" not in name}


def test_an_installed_wheel_generates_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = "import replayssm, replayssm.models; print(replayssm.__file__, replayssm.models.__file__, sep='\\n')"
    for file in run(installed / "python", "-c", where, cwd=tmp_path).stdout.split("\n")[:2]:
        assert Path(file).is_relative_to(installed.parent)
    as_module = run(installed / "python", "-m", "replayssm", *GENERATE, cwd=tmp_path).stdout
    as_command = run(installed / "replayssm", *GENERATE, cwd=tmp_path).stdout
    assert len(as_module) > len("def ")
    assert as_module == as_command


# Blocked, broken, as it is: triton may be missing, or there without a GPU, or fail on first use.
PRELUDES = {
    "no triton": "import sys; sys.modules['triton'] = None",
    "triton that raises": """
import sys, types
class Broken(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):  # what Python itself asks any module for
            raise AttributeError(name)
        raise RuntimeError(f"0 active drivers ({name})")
sys.modules["triton"] = Broken("triton")
""",
    "as installed": "",
}
CPU_USE = """
import torch
import replayssm
from replayssm import cli
from replayssm.models import from_pretrained

model, tokenizer = from_pretrained("tiny")
print(replayssm.generate(model, [list(b"def ")], max_new_tokens=8).tolist())

loss = model(torch.tensor([list(b"import os")])).logsumexp(-1).mean()
loss.backward()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.grad is not None:  # the head for drafts takes no part
            parameter -= 0.1 * parameter.grad

try:
    replayssm.ReplayStateCache(model, 1, max_seqlen=32, backend="triton")
except (NotImplementedError, RuntimeError) as error:
    assert "triton" in str(error).lower() or "GPU" in str(error), error
else:
    raise SystemExit("backend='triton' was accepted on a CPU")
"""


def test_import_needs_no_triton_and_says_nothing(tmp_path: Path) -> None:
    script = "import sys, replayssm, replayssm.models, replayssm.cli; print('triton' in sys.modules)"
    done = run(sys.executable, "-c", script, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_cpu_use_is_the_same_whatever_triton_does(tmp_path: Path) -> None:
    printed = {name: run(sys.executable, "-c", text + CPU_USE, cwd=tmp_path).stdout for name, text in PRELUDES.items()}
    assert len(set(printed.values())) == 1, printed


def test_the_package_exports_the_public_names_and_nothing_else() -> None:
    layers = {"ReplayLayer", "ReplayMamba2", "ReplayGatedDeltaNet", "ReplayKDA"}
    expected = layers | {"Records", "Recurrence", "ReplayStateCache", "LayerState", "generate"}
    assert expected <= set(replayssm.__all__)
    visible = {name for name, value in vars(replayssm).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in visible if not name.startswith("_")} <= set(replayssm.__all__)
