"""A scan on flash-linear-attention: which calls it takes, what it says of the others, and that its results are ours."""

import copy
import functools
import sys
import types
import warnings

import pytest
import torch
from budgets import assert_e16, assert_same_bits, e32, rms
from draws import DEVICE, draw
from geometries import CASES, G, Geometry, decode_in_pieces
from records import between, make_records, to
from refusals import refused
from torch.utils._python_dispatch import TorchDispatchMode

import replayssm
from replayssm.ops import chunked
from replayssm.ops import scan as scans
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Call, ScanBackendWarning, choose

MAMBA2, GDN, KDA = (geometry.build().recurrence for geometry in CASES)
CUDA = torch.device("cuda", 0)
FITS = Call(CUDA, torch.bfloat16, 64, 128, GDN, grad=False)
every_recurrence = pytest.mark.parametrize("recurrence", [MAMBA2, GDN, KDA], ids=["mamba2", "gdn", "kda"])


@pytest.fixture
def hopper(monkeypatch):
    """As on a Hopper card with fla installed and triton 3.6.0."""
    monkeypatch.setattr(scans, "FLA_VERSION", "0.6.0")
    monkeypatch.setattr(scans, "TRITON_VERSION", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


class HalfProducts(TorchDispatchMode):
    """Plain PyTorch as 16-bit kernels compute: the operands of every matrix product and solve rounded, sums in fp32."""

    PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.linalg_solve_triangular)

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.PRODUCTS:
            args = [x.to(self.dtype).to(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))


# ---- which calls it takes


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": torch.device("cpu")}, ["CUDA device", "got cpu"]),
        ({"dtype": torch.float32}, ["bfloat16", "got torch.float32"]),
        ({"dtype": torch.float64}, ["float16", "got torch.float64"]),
        ({"d_state": 258}, ["d_state <= 256", "got 258"]),
        ({"headdim": 5}, ["even headdim", "headdim=5"]),
        ({"d_state": 7, "recurrence": MAMBA2}, ["even headdim and d_state", "d_state=7"]),
        ({"recurrence": Recurrence(decay="channel", delta=False)}, ["decay per head or the delta rule"]),
        ({"grad": True}, ["backward pass", "3.7.1", "got triton 3.6.0"]),
        ({"grad": True, "recurrence": MAMBA2}, ["backward pass on Hopper"]),
    ],
    ids=str,
)
def test_what_fla_cannot_take_is_refused_by_name_and_left_to_pytorch(change, words):
    call = FITS._replace(**change)
    with refused(ValueError, "scan_backend='fla'", "scan_backend='torch'", *words):
        choose("ReplayLayer.forward", call, "fla")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert choose("ReplayLayer.forward", call, "auto") == "torch"
    assert [each.category for each in caught] == ([ScanBackendWarning] if call.grad else [])
    assert choose("ReplayLayer.forward", call, "torch") == "torch"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"d_state": 512, "recurrence": MAMBA2},
        {"d_state": 256, "headdim": 512, "recurrence": KDA},
        {"headdim": 40, "d_state": 24},
        {"grad": True, "recurrence": KDA},
    ],
    ids=str,
)
def test_what_fla_can_take_it_takes(change):
    call = FITS._replace(**change)
    assert choose("ReplayLayer.forward", call, "auto") == choose("ReplayLayer.forward", call, "fla") == "fla"
    assert choose("ReplayLayer.forward", call, "torch") == "torch"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "triton", "backend"),
    [
        ((9, 0), "3.3.1", "fla"),
        ((9, 0), "3.4.0", "torch"),
        ((9, 0), "3.7.0+git5", "torch"),
        ((9, 0), "3.7.1", "fla"),
        ((9, 0), "3.10.0", "fla"),
        ((8, 0), "3.6.0", "fla"),
        ((10, 0), "3.6.0", "fla"),
    ],
)
def test_a_backward_pass_is_left_to_pytorch_where_triton_miscompiles_it(monkeypatch, capability, triton, backend):
    monkeypatch.setattr(scans, "TRITON_VERSION", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScanBackendWarning)
        assert choose("ReplayLayer.forward", FITS._replace(grad=True), "auto") == backend
    assert choose("ReplayLayer.forward", FITS, "auto") == "fla"


@pytest.mark.usefixtures("hopper")
def test_the_warning_says_who_and_why_and_what_to_do():
    with pytest.warns(ScanBackendWarning, match=r"ReplayX\.forward.*gradients.*triton 3\.6\.0.*Install"):
        choose("ReplayX.forward", FITS._replace(grad=True), "auto")


@pytest.mark.usefixtures("hopper")
def test_auto_is_pytorch_while_a_graph_is_traced(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose("ReplayLayer.forward", FITS, "auto") == "torch"


@pytest.mark.parametrize("version", [None, "0.5.1", "0.7.0", "1.6.0"])
def test_without_its_release_fla_is_refused_when_the_layer_is_built_and_auto_is_pytorch(monkeypatch, version):
    monkeypatch.setattr(scans, "FLA_VERSION", version)
    with refused(ImportError, "ReplayGatedDeltaNet", "fla-core 0.6", version or "none", "pip install 'replayssm[fla]'"):
        G.but(scan_backend="fla").build()
    with refused(ImportError, "pip install"):  # a layer that was built where it is installed
        choose("ReplayLayer.forward", FITS, "fla")
    assert choose("ReplayLayer.forward", FITS, "auto") == "torch"


@pytest.mark.parametrize("change", ["q", "k", "v", "g", "beta", "state"])
def test_one_wide_or_differentiable_tensor_decides_the_call(monkeypatch, change):
    calls = []
    monkeypatch.setattr(scans, "choose", lambda where, call, backend: calls.append(call) or "torch")
    q, records = make_records(decay="head", delta=True, t=3, headdim=4, d_state=6)
    tensors = {"q": q, **records._asdict(), "state": draw(5, 1, 2, 4, 6)}
    tensors = {name: x.to(torch.bfloat16 if name in "qkv" else torch.float32) for name, x in tensors.items()}

    def run():
        q, *fields, state = tensors.values()
        scans.scan("ReplayX", q, Records(*fields), state, GDN, "auto")

    run()
    tensors[change] = tensors[change].double().requires_grad_()
    run()
    with torch.no_grad():
        run()
    plain = Call(tensors["v"].device, torch.bfloat16, 4, 6, GDN, grad=False)
    assert calls == [plain, plain._replace(dtype=torch.float64, grad=True), plain._replace(dtype=torch.float64)]


# ---- a layer and its backend


@pytest.mark.parametrize("geometry", CASES, ids=repr)
def test_a_layer_says_which_backend_it_uses(geometry):
    layer = geometry.build(torch.float32)
    assert (layer.scan_backend, layer.scan_runs_on(), layer.scan_runs_on(grad=True)) == ("auto", "torch", "torch")
    assert "scan_backend=auto (torch)" in repr(layer)
    assert "scan_backend=torch" in repr(geometry.but(scan_backend="torch").build())


@pytest.mark.parametrize("geometry", CASES, ids=repr)
def test_a_layer_that_asks_for_fla_in_fp64_is_refused_before_anything_changes(monkeypatch, geometry):
    monkeypatch.setattr(scans, "FLA_VERSION", "0.6.0")
    layer, x = geometry.but(scan_backend="fla").build(), geometry.input(2, 5)
    name = type(layer).__name__
    with refused(ValueError, f"{name}.forward", "scan_backend='fla'"):
        layer(x)
    with refused(ValueError, f"{name}.forward"):
        layer.scan_runs_on()
    assert "scan_backend=fla" in repr(layer)
    cache = replayssm.ReplayStateCache([layer], 2, window=4, step_tokens=2)
    with refused(ValueError, f"{name}.forward", "scan_backend='fla'", cache=cache):
        layer(x, cache[0])
    with torch.no_grad():  # a step of at most step_tokens tokens is no scan, and the refused call left no step open
        layer(x[:, :2], cache[0])
    cache.commit()


@pytest.mark.parametrize("geometry", CASES, ids=repr)
def test_a_chosen_backend_runs_training_and_prefill_with_state_and_padding(monkeypatch, geometry):
    """A stand-in for the kernels, exact, that returns what they return: outputs in the dtype of v, and the state."""
    calls = []

    def stand_in(q, records, state, recurrence, *, grad):
        calls.append((None if state is None else state.clone(), grad))
        y, final = chunked.scan(q, records, state, recurrence)
        return y.to(records.v.dtype), final

    module = types.ModuleType("replayssm.ops.fla_scan")
    module.scan = stand_in
    monkeypatch.setitem(sys.modules, "replayssm.ops.fla_scan", module)
    monkeypatch.setattr(replayssm.ops, "fla_scan", module, raising=False)
    layer, x = geometry.build(), geometry.input(3, 23)
    expected, expected_cache = decode_in_pieces(layer, x, [9, 1, 2, 11], window=4, step_tokens=2)
    mask = torch.ones(3, 23, dtype=torch.int64, device=DEVICE)
    mask[0, :6] = mask[2, 20:] = 0
    padded = layer(x, attention_mask=mask)
    monkeypatch.setattr(scans, "choose", lambda where, call, backend: "fla")
    y, cache = decode_in_pieces(layer, x, [9, 1, 2, 11], window=4, step_tokens=2)
    assert_same_bits(y, expected)
    assert_same_bits(cache[0].checkpoint, expected_cache[0].checkpoint)
    assert len(calls) == 2
    assert not calls[0][0].any()
    assert calls[1][0].any(), "the second scan must continue from the state of the first"
    assert_same_bits(layer(x, attention_mask=mask), padded)
    assert [grad for _, grad in calls] == [False, False, True]


# ---- fla's own plain references, where it is installed


@every_recurrence
def test_fla_means_by_its_arguments_what_we_mean(recurrence):
    names = {MAMBA2: "simple_gla", GDN: "gated_delta_rule", KDA: "kda"}
    naive = pytest.importorskip(f"fla.ops.{names[recurrence]}.naive", reason="flash-linear-attention is not installed")
    q, records = make_records(decay=recurrence.decay, delta=recurrence.delta, batch=2, t=9, heads=(3, 3))
    state = draw(7, 2, 3, 5, 7)
    exact, exact_final = chunked.scan(q, records, state, recurrence)
    q, (k, v, g, beta), state = q.float(), to(records, torch.float32), state.float()
    shared = dict(scale=1.0, initial_state=state.mT.contiguous(), output_final_state=True)
    if recurrence == KDA:
        y, final = naive.naive_recurrent_kda(q, k, v, g, beta, **shared)
    elif recurrence == GDN:
        y, final = naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g.squeeze(-1), **shared)
    else:
        y, final = naive.naive_recurrent_simple_gla(q, k, v * beta.unsqueeze(-1), g.squeeze(-1), **shared)
    plain, plain_final = chunked.scan(q, Records(k, v, g, beta), state, recurrence)
    assert rms(y - exact) <= e32(plain, exact)
    assert rms(final.mT - exact_final) <= e32(plain_final, exact_final)


# ---- on a GPU


def on_a_gpu():
    """fla's scan, or skip."""
    if DEVICE.type != "cuda":
        pytest.skip("needs a GPU: REPLAYSSM_TEST_DEVICE=cuda")
    pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    from replayssm.ops import fla_scan

    return fla_scan.scan


# (nheads, ngroups), headdim, d_state: two only, because fla compiles dozens of kernels for each
SIZES = [((6, 2), 40, 24), ((4, 4), 64, 128)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=["40x24", "64x128"])


def sixteen_bit(recurrence, sizes, t, gate="random", dtype=torch.bfloat16):
    """Queries and records as layers make them (q, k, v in 16 bits, g, beta in fp32), the same in fp64, and a state."""
    heads, headdim, d_state = sizes
    shape = dict(batch=2, t=t, heads=heads, headdim=headdim, d_state=d_state, gate=gate)
    q, records = make_records(decay=recurrence.decay, delta=recurrence.delta, seed=t, **shape)
    q, (k, v, g, beta) = q.to(dtype), to(records, torch.float32)
    records = Records(k.to(dtype), v.to(dtype), g, beta)
    state = draw(9, 2, heads[0], headdim, d_state, dtype=torch.float32)
    return (q, records, state), (q.double(), to(records, torch.float64), state.double())


@pytest.mark.gpu
@every_recurrence
@every_size
@pytest.mark.parametrize("t", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("gate", ["random", "none", "twenty", "mixed", "burst"])
def test_outputs_and_state_are_within_the_budget(recurrence, sizes, t, gate):
    run = on_a_gpu()
    dtype = torch.float16 if gate == "none" else torch.bfloat16
    inputs, wide = sixteen_bit(recurrence, sizes, t, gate, dtype)
    for first in (inputs, (*inputs[:2], None)):
        exact = chunked.scan(*wide[:2], None if first[2] is None else wide[2], recurrence)
        with HalfProducts(dtype):
            plain = chunked.scan(*first, recurrence)
        for grad in (False, True):
            y, final = run(*first, recurrence, grad=grad)
            assert (y.dtype, final.dtype) == (dtype, torch.float32)
            assert_e16(y, plain[0], exact[0], f"output (state {first[2] is not None}, grad {grad})")
            assert_e16(final, plain[1], exact[1], f"state (state {first[2] is not None}, grad {grad})")


@pytest.mark.gpu
@every_recurrence
@pytest.mark.parametrize("t", [63, 130])
def test_gradients_are_within_the_budget(recurrence, t):
    run = on_a_gpu()
    (_, headdim, d_state) = sizes = SIZES[1]
    refusal = scans.refusal_of(Call(CUDA, torch.bfloat16, headdim, d_state, recurrence, grad=True))
    if refusal is not None:
        pytest.skip(str(refusal))
    inputs, wide = sixteen_bit(recurrence, sizes, t)
    weights = draw(10, *inputs[1].v.shape), draw(11, *inputs[2].shape)

    def gradients(run, q, records, state):
        leaves = [x.clone().requires_grad_() for x in (q, *records, state)]
        results = run(leaves[0], Records(*leaves[1:5]), leaves[5], recurrence)
        sum((y * weight.to(y.dtype)).sum() for y, weight in zip(results, weights, strict=True)).backward()
        return [leaf.grad for leaf in leaves]

    exact = gradients(chunked.scan, *wide)
    with HalfProducts(torch.bfloat16):
        plain = gradients(chunked.scan, *inputs)
    got = gradients(functools.partial(run, grad=True), *inputs)
    for name, *three in zip(("q", *Records._fields, "state"), got, plain, exact, strict=True):
        assert_e16(*three, f"gradient of {name}")


@pytest.mark.gpu
@every_recurrence
def test_tokens_of_zeros_change_nothing_and_strides_are_free(recurrence):
    run = on_a_gpu()
    (q, records, state), _ = sixteen_bit(recurrence, SIZES[0], 100)
    masked = Records(*(torch.cat([x[:, :70], torch.zeros_like(x[:, 70:])], 1) for x in records))
    y, final = run(q, masked, state, recurrence, grad=False)
    apart, apart_final = run(q[:, :70], between(records, 0, 70), state, recurrence, grad=False)
    assert_same_bits(y[:, :70], apart)
    assert_same_bits(final, apart_final)
    padded = torch.cat([state, state], -1)[..., : state.shape[-1]]
    for place in (0, -1):  # of time in memory
        strided = Records(*(x.movedim(1, place).contiguous().movedim(place, 1) for x in masked))
        for got, expected in zip(run(q, strided, padded, recurrence, grad=False), (y, final), strict=True):
            assert_same_bits(got, expected)


LAYERS = [
    Geometry("mamba2", 64, 6, 40, 24, {"ngroups": 2}),
    Geometry("gated_deltanet", 64, 6, 40, 24, {"ngroups": 2}),
    Geometry("kda", 64, 4, 64, 128, {"lower_bound": -5.0}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", LAYERS, ids=lambda geometry: geometry.kind)
def test_a_layer_on_fla_prefills_as_the_layer_on_pytorch(geometry):
    on_a_gpu()
    layer, x = geometry.build(torch.bfloat16), geometry.input(3, 140, dtype=torch.bfloat16)
    assert (layer.scan_backend, layer.scan_runs_on()) == ("auto", "fla")
    assert "auto (fla)" in repr(layer)
    other = copy.deepcopy(layer)
    other.scan_backend = "torch"
    y, cache = decode_in_pieces(layer, x, [100, 1, 2, 37], window=4, step_tokens=2)
    exact, exact_cache = decode_in_pieces(other, x, [100, 1, 2, 37], window=4, step_tokens=2)
    with HalfProducts(torch.bfloat16):
        plain, plain_cache = decode_in_pieces(other, x, [100, 1, 2, 37], window=4, step_tokens=2)
    assert_e16(cache[0].checkpoint, plain_cache[0].checkpoint, exact_cache[0].checkpoint, "state")
    assert_e16(y, plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", LAYERS, ids=lambda geometry: geometry.kind)
def test_training_in_sixteen_bits_says_which_backend_it_uses(geometry):
    on_a_gpu()
    layer, x = geometry.build(torch.bfloat16), geometry.input(2, 70, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = layer.scan_runs_on(grad=True)
        caught.clear()
        layer(x).float().square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    said = [each for each in caught if issubclass(each.category, ScanBackendWarning)]
    assert len(said) == (backend == "torch")
    if backend == "torch":
        with pytest.raises(ValueError, match="backward pass"):
            geometry.but(scan_backend="fla").build(torch.bfloat16)(x)
