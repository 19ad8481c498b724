"""Every layer, every constructor option: the layer against the token loop over its parameters."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from backends import both_backends, interpreted
from budgets import assert_e32, assert_e64, assert_gradient, assert_same_bits, e32
from draws import DEVICE, draw
from geometries import CASES, LAYERS, VARIANTS, K, M, R, decode_in_pieces
from refusals import refused

import replayssm
import replayssm.layers


def layers_of_the_library() -> list[type[replayssm.ReplayLayer]]:
    """Every replay layer in replayssm/layers, by listing the folder."""
    modules = [
        importlib.import_module(f"replayssm.layers.{m.name}") for m in pkgutil.iter_modules(replayssm.layers.__path__)
    ]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return sorted(
        (c for c in classes if issubclass(c, replayssm.ReplayLayer) and c is not replayssm.ReplayLayer), key=str
    )


@pytest.mark.parametrize("layer", layers_of_the_library(), ids=lambda layer: layer.__name__)
def test_every_layer_is_public_and_under_test(layer):
    assert getattr(replayssm, layer.__name__) is layer
    assert layer in LAYERS.values(), "add the layer to tests/geometries.py and its token loop to tests/oracles.py"


@pytest.mark.parametrize("layer", layers_of_the_library(), ids=lambda layer: layer.__name__)
def test_every_option_of_a_layer_is_under_test(layer):
    """Each keyword of the constructor takes at least two values among the variants."""
    parameters = inspect.signature(layer.__init__).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    variants = [v for v in VARIANTS if LAYERS[v.kind] is layer]
    own = {name: {str(v.options.get(name, default)) for v in variants} for name, default in options.items()}
    # d_state of KDA is an option that every geometry gives; the rest is not part of the maths
    same = {name for name, values in own.items() if len(values) < 2} - {"d_state", "scan_backend", "device", "dtype"}
    assert same <= {"dt_limits"}, (
        f"no variant changes {same}"
    )  # dt_limits: test_cases_caching.py, with the clamp in sight


def skip_options_of_projections(geometry):
    """Kernels see records alone: a layer of each kind is enough where they are interpreted."""
    if interpreted() and geometry not in (*CASES, R):
        pytest.skip("kernels do not see this option")


@pytest.mark.parametrize("geometry", VARIANTS, ids=repr)
def test_forward_equals_the_token_loop(geometry):
    layer, x = geometry.build(), geometry.input(2, 11)
    with torch.no_grad():
        assert_e64(layer(x), geometry.trace(layer, x).output)


@both_backends
@pytest.mark.parametrize("geometry", VARIANTS, ids=repr)
def test_prefill_and_decoding_equal_the_token_loop(geometry):
    skip_options_of_projections(geometry)
    layer, x = geometry.build(), geometry.input(2, 17)
    exact = geometry.trace(layer, x)
    y, cache = decode_in_pieces(layer, x, [6, 1, 3, 1, 2, 1, 1, 2], window=4, step_tokens=3)
    assert_e64(y, exact.output)
    assert_e64(cache[0].state(), exact.states[:, -1], "state")


@both_backends
@pytest.mark.parametrize("geometry", VARIANTS, ids=repr)
def test_fp32_layers_stay_within_the_budget(geometry):
    skip_options_of_projections(geometry)
    layer, x = geometry.build(torch.float32), geometry.input(3, 40, dtype=torch.float32)
    exact, plain = geometry.trace(layer, x.double()), geometry.trace(layer, x)
    y, cache = decode_in_pieces(layer, x, [25, *[1] * 15], window=5)
    assert y.dtype == cache[0].checkpoint.dtype == torch.float32
    assert_e32(y, exact.output, e32(plain.output, exact.output))
    assert_e32(cache[0].state(), exact.states[:, -1], e32(plain.states, exact.states), "state")


# a key of one number has no direction to learn: the gradient of its projection is rounding
@pytest.mark.parametrize("geometry", [v for v in VARIANTS if v.d_state > 1], ids=repr)
def test_gradients_equal_those_of_the_token_loop(geometry):
    layer = geometry.build()
    weight = draw(3, 2, 9, geometry.d_model)
    gradients = []
    for run in (layer, lambda x: geometry.trace(layer, x).output):
        x = geometry.input(2, 9).requires_grad_()
        layer.zero_grad()
        (run(x) * weight).sum().backward()
        gradients.append({"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, exact in gradients[1].items():
        assert_gradient(gradients[0][name], exact, name)


@pytest.mark.parametrize("geometry", [*CASES, R], ids=repr)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_forward_equals_the_row_alone(geometry, side):
    layer, x = geometry.build(), geometry.input(3, 9)
    lengths = [9, 4, 1]
    mask = torch.zeros(3, 9, dtype=torch.int64, device=DEVICE)
    for row, length in enumerate(lengths):
        mask[row, slice(9 - length, 9) if side == "left" else slice(0, length)] = 1
    x[mask == 0] = torch.nan
    with torch.no_grad():
        y = layer(x, attention_mask=mask)
    assert torch.equal(y[mask == 0], torch.zeros_like(y[mask == 0]))
    for row in range(3):
        alone = x[row : row + 1, mask[row] == 1]
        assert_e64(y[row : row + 1, mask[row] == 1], geometry.trace(layer, alone).output, f"row {row}")


@both_backends
@pytest.mark.parametrize("geometry", [*CASES, R], ids=repr)
def test_equal_seeds_draw_equal_layers_and_nothing_holds_the_cache(geometry):
    layer, x = geometry.build(), geometry.input(2, 5)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    attributes = set(vars(layer))
    decode_in_pieces(layer, x, [3, 1, 1], window=2)
    assert set(vars(layer)) == attributes
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_forward_is_final():
    with pytest.raises(TypeError, match="forward is final"):

        class Overriding(replayssm.ReplayLayer):
            def forward(self, x):
                return x


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[..., :-1], ["x must be", "(2, 5, 23)", "d_model=24"]),
        (lambda x: x[0], ["x must be", "(5, 24)"]),
        (lambda x: x[:, :0], ["x must"]),
        (lambda x: x.float(), ["x must", "torch.float32", "torch.float64"]),
        (lambda x: x.to("meta"), ["x must be on", "got meta"]),
    ],
    ids=["features", "axes", "no tokens", "dtype", "device"],
)
@pytest.mark.parametrize("with_state", [False, True], ids=["training", "cached"])
@pytest.mark.parametrize("geometry", CASES, ids=repr)
def test_a_wrong_input_is_refused_before_anything_changes(geometry, with_state, change, words):
    layer, x = geometry.build(), geometry.input(2, 5)
    _, cache = decode_in_pieces(layer, geometry.input(2, 3), [2, 1], window=4, step_tokens=2)
    with refused(ValueError, *words, cache=cache):
        layer(change(x), cache[0]) if with_state else layer(change(x))
    with torch.no_grad():  # and the next step is an ordinary one
        layer(x[:, :1], cache[0])
    cache.commit()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 4, dtype=torch.int64), ["attention_mask must", "(2, 5)", "(2, 4)"]),
        (torch.ones(2, 1, 5, 5, dtype=torch.bool), ["attention_mask must", "(2, 5)"]),
        (torch.zeros(2, 5), ["attention_mask must", "float32"]),
        (torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]), ["attention_mask must", "left"]),
    ],
    ids=["length", "4-D", "additive", "interior"],
)
def test_a_mask_that_cannot_be_is_refused_in_training(mask, words):
    layer = M.build()
    with refused(ValueError, *words):
        layer(M.input(2, 5), attention_mask=mask.to(DEVICE))


def test_a_state_of_another_layer_is_refused():
    layer, other = M.build(), K.build()
    cache = replayssm.ReplayStateCache([other], 2)
    with refused(ValueError, "state must be", "state_of", cache=cache):
        layer(M.input(2, 1), cache[0])


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (M, {"ngroups": 4}, ["nheads must be a multiple of ngroups=4", "got 6"]),
        (M, {"ngroups": 0}, ["ngroups must", "got 0"]),
        (M, {"d_conv": 2**63}, ["d_conv must", "64 bits"]),
        (M, {"d_conv": 0}, ["d_conv must", "got 0"]),
        (M, {"norm": "first"}, ["norm must", "gate_first", "norm_first"]),
        (M, {"norm_groups": 7}, ["must", "multiple", "7"]),
        (M, {"dt_limits": (0.1, 0.01)}, ["dt_limits must", "0.1"]),
        (M, {"segment_multipliers": (1.0, 2.0)}, ["segment_multipliers must", "5"]),
        (CASES[1], {"ngroups": 4}, ["nheads must be a multiple of ngroups=4", "got 6"]),
        (CASES[1], {"gate_activation": "relu"}, ["gate_activation must", "relu"]),
        (K, {"lower_bound": 5.0}, ["lower_bound must", "5.0"]),
        (K, {"gate_rank": 0}, ["gate_rank must", "got 0"]),
        (K, {"output_gate_rank": -1}, ["output_gate_rank must", "got -1"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_an_impossible_layer_is_refused(kind, options, words):
    with refused(ValueError, *words):
        kind.but(**options).build()


def test_an_unknown_scan_backend_is_refused():
    with refused(NotImplementedError, "scan_backend", "'auto', 'torch', 'fla'", "cuda"):
        M.but(scan_backend="cuda").build()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("geometry", CASES, ids=repr)
def test_a_traced_layer_gives_what_the_layer_gives(geometry):
    layer, x = geometry.build(), geometry.input(2, 5, seed=1)
    with torch.no_grad():
        assert_same_bits(torch.jit.trace(layer, (x,))(x), layer(x))
