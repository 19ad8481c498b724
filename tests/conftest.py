"""Settings of every test run: one thread a worker, kernels interpreted on a CPU, the Hypothesis profile, markers."""

import importlib.util
import os

# Before torch starts its thread pool: two test workers share two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# MKL otherwise sums in another order for another alignment, and a row's bits would depend on its place in the batch.
os.environ["MKL_CBWR"] = "AUTO,STRICT"
# Before triton is imported: without a GPU its kernels run on the CPU, by the interpreter.
if os.environ.get("REPLAYSSM_TEST_DEVICE", "cpu") == "cpu" and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import interp_shim  # noqa: F401

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from replayssm.ops import decode

torch.set_num_threads(1)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
common = dict(
    deadline=None,  # shared cores jitter by a factor of two
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
# A check must not fail by luck, so CI draws the same examples every time; nightly draws others. Making a failure's
# example small takes minutes for each, and is done at night.
settings.register_profile(
    "ci",
    max_examples=15,
    derandomize=True,
    stateful_step_count=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    **common,
)
settings.register_profile("nightly", max_examples=300, stateful_step_count=40, **common)
settings.load_profile(PROFILE)


@pytest.fixture(scope="module", params=["torch", "triton"])
def decoding_backend(request: pytest.FixtureRequest) -> str:
    """What "auto" takes: each of the two in turn, wherever the tests run."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture(autouse=True)
def automatic_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched test by test: those of a file that do not ask for ``decoding_backend`` must not run on the last one."""
    if "decoding_backend" in request.fixturenames:
        chosen = request.getfixturevalue("decoding_backend")
        monkeypatch.setattr(decode, "automatic", lambda device: chosen)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROFILE != "nightly":
        skip = pytest.mark.skip(reason="nightly only: run with HYPOTHESIS_PROFILE=nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)
