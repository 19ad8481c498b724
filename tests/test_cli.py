"""The command line: what it prints where, what it refuses, and when --compare fails."""

import importlib.metadata
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import replayssm
from replayssm import ReplayStateCache, cli, generate
from replayssm.bench.cases import CASES
from replayssm.cache import formats
from replayssm.cache.checkpoint import NAMES
from replayssm.drafters import MTPHead
from replayssm.models import ByteTokenizer, HybridLM, from_pretrained
from replayssm.plan import (
    USABLE,
    conventional_step,
    conventional_traffic,
    replay_step,
    replay_traffic,
    state_bytes,
)
from replayssm.prefill import PREFILL_PIECE

PROMPT = "def f(x):"
CONFIG = {
    "model_type": "replayssm_hybrid",
    "vocab_size": 260,  # wider than the tokenizer
    "d_model": 32,
    "tie_embeddings": False,
    "norm_eps": 1e-5,
    "tokenizer": "bytes",
    "layers": [
        {"type": "mamba2", "nheads": 2, "headdim": 8, "d_state": 16},
        {"type": "attention", "nheads": 2, "headdim": 8, "window": 64},
        {"type": "gated_deltanet", "nheads": 2, "headdim": 8, "d_state": 16},
        {"type": "kda", "nheads": 2, "headdim": 8},
        {"type": "mlp", "hidden": 32},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    endless().save_pretrained(path)
    return str(path)


def endless() -> HybridLM:
    """A model that never ends a text by itself: some of its 256 logits is larger than 0."""
    torch.manual_seed(0)
    model = HybridLM(CONFIG)
    with torch.no_grad():
        model.lm_head.weight[0] = 0
    return model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def continuation(folder: str, prompt: bytes, count: int) -> str:
    model, tokenizer = from_pretrained(folder)
    tokens = generate(model, [[0, *prompt]], max_new_tokens=count, vocab_size=256)
    return tokenizer.decode(tokens[0].tolist())


def test_the_text_goes_to_standard_output_and_the_figures_to_standard_error(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", "--window", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + continuation(folder, PROMPT.encode(), 20) + "\n"
    sizes = state_bytes(ReplayStateCache(from_pretrained(folder)[0], 1))
    figures = [*replay_traffic(sizes, 5)[:2], *conventional_traffic(sizes)[:2]]
    assert re.fullmatch(r"\[20 tokens, [\d.]+ tokens/s, window 5: .*\]\n", printed.err)
    assert re.findall(r"\d+,\d+", printed.err) == [f"{figure:,}" for figure in figures]


def test_a_prompt_from_standard_input_is_continued_byte_for_byte_and_not_repeated(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = b"caf\xc3\xa9 \xff\r\n"
    for spelling in ([], ["-"]):
        pipe(monkeypatch, prompt)
        assert cli.main(["generate", *spelling, "--model", folder, "--max-new-tokens", "8"]) == 0
        assert capsys.readouterr().out == continuation(folder, prompt, 8) + "\n"


def test_a_long_prompt_shows_progress(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 2 * PREFILL_PIECE + 7
    pipe(monkeypatch, b"x" * (total - 1))  # and a zero byte in front
    assert cli.main(["generate", "--model", folder, "--max-new-tokens", "1"]) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[prompt")]
    done = (total // 3 + 1, 2 * (total // 3) + 2, total)  # three pieces of about one length
    assert shown == [f"[prompt: {tokens} of {total} tokens]" for tokens in done]


@pytest.mark.parametrize("drafter", ["prompt_lookup", "mtp", "itself"])
def test_drafts_leave_the_text_as_it_is_and_the_report_says_how_many_were_right(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str], drafter: str
) -> None:
    model = endless()
    model.mtp = MTPHead(32, 16)
    model.save_pretrained(tmp_path)
    named = str(tmp_path) if drafter == "itself" else drafter
    command = ["generate", PROMPT, "--model", str(tmp_path), "--max-new-tokens", "20", "--compare"]
    assert cli.main([*command, "--drafter", named, "--num-drafts", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + continuation(folder, PROMPT.encode(), 20) + "\n"
    said = r"\[20 tokens, [\d.]+ tokens/s, window 16, mean accepted length ([\d.]+) tokens a step, (.*)\]\n\[compare: a"
    found = re.match(said, printed.err)
    assert found
    # 19 tokens: the first comes out of the prompt; 4 a step, and 3 in the last
    assert drafter != "itself" or (found[1], found[2]) == ("3.80", "100% of 14 drafts accepted")
    assert 1 <= float(found[1]) <= 4


def test_a_seed_fixes_the_text_and_the_seed_that_was_used_is_shown(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", "--temperature", "1"]
    assert cli.main(command) == 0
    first = capsys.readouterr()
    (seed,) = re.findall(r"seed (\d+)", first.err)
    assert cli.main([*command, "--seed", seed]) == 0
    assert capsys.readouterr().out == first.out
    assert cli.main([*command, "--seed", str(int(seed) + 1)]) == 0
    assert capsys.readouterr().out != first.out


def test_the_text_ends_where_the_model_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, prompt = endless(), [0, *PROMPT.encode()]
    text = generate(model, [prompt], max_new_tokens=20, vocab_size=256)[0].tolist()
    with torch.no_grad():  # the zero byte wins over the token that would come tenth
        model.lm_head.weight[0] = 1.01 * model.lm_head.weight[text[9]]
    model.save_pretrained(tmp_path)
    text = generate(model, [prompt], max_new_tokens=20, vocab_size=256)[0].tolist()
    end = text.index(0)
    assert end < 10
    assert cli.main(["generate", PROMPT, "--model", str(tmp_path), "--max-new-tokens", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + bytes(text[:end]).decode(errors="replace") + "\n"
    assert printed.err.startswith(f"[{end + 1} tokens, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/folder"], ["no/such/folder"]),
        (["--window", "-1"], ["window must be", "got -1"]),
        (["--window", f"{10**20}"], ["window must be", "64 bits"]),
        (["--max-new-tokens", f"{10**20}"], ["max_seqlen must be", "64 bits"]),
        (["--top-p", "1.5", "--temperature", "1"], ["top_p must be", "got 1.5"]),
        (["--device", "abacus"], ["--device must be", "got abacus"]),
        (["--compare", "--temperature", "0.5"], ["--compare must go with", "got temperature 0.5"]),
        (["--num-drafts", "2"], ["--num-drafts must come with --drafter"]),
        (["--drafter", "mtp"], ["drafter must be", "without an MTP head"]),
        (["--drafter", "no/such/folder"], ["no/such/folder"]),
        (["--drafter", "prompt_lookup", "--num-drafts", "16"], ["window must be", "step_tokens=17"]),
        (["--compare", "--dtype", "bfloat16"], ["--compare must go with", "dtype bfloat16"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2_before_any_text(
    folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.main(["generate", PROMPT, "--model", folder, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"replayssm generate: (?!generate: ).+; got .+\. .+\n", printed.err)
    assert all(word in printed.err for word in words)


@pytest.mark.parametrize("arguments", [["--window", "2.5"], ["--max-new-tokens", "0"], ["--dtype", "int8"]])
def test_what_is_no_number_or_choice_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", PROMPT, "--model", "no/such/folder", *arguments])
    assert f"argument {arguments[0]}: " in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HybridLM({key: value for key, value in CONFIG.items() if key != "tokenizer"}).save_pretrained(tmp_path)
    assert cli.main(["generate", PROMPT, "--model", str(tmp_path)]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(("stdin", "word"), [(Terminal("x"), "terminal"), (io.TextIOWrapper(io.BytesIO()), "empty")])
def test_a_missing_prompt_is_refused_with_a_remedy(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOBase, word: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["generate", "--model", folder]) == 2
    assert word in capsys.readouterr().err


def test_compare_finds_every_token_equal_and_the_smallest_margin(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = PROMPT * (PREFILL_PIECE // len(PROMPT) + 1)  # read in two pieces
    assert (
        cli.main(["generate", prompt, "--model", folder, "--max-new-tokens", "40", "--window", "7", "--compare"]) == 0
    )
    found = re.search(r"all 40 tokens equal .* smallest argmax margin (\S+) at token (\d+)", capsys.readouterr().err)
    assert found
    model, _ = from_pretrained(folder, dtype=torch.float64)
    ids = [0, *prompt.encode()]
    tokens = generate(model, [ids], max_new_tokens=40, vocab_size=256)[0].tolist()
    with torch.no_grad():
        best = model(torch.tensor([ids + tokens[:-1]]), logits_to_keep=40)[0, :, :256].topk(2).values
    margin, at = (best[:, 0] - best[:, 1]).min(0)
    assert float(found[1]) == pytest.approx(float(margin), rel=0.02)
    assert int(found[2]) == int(at)


def test_compare_fails_on_a_token_that_rounding_does_not_explain(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT.encode())
    tokens = generate(model, [ids], max_new_tokens=6, vocab_size=256)[0].tolist()
    tokens[4] = (tokens[4] + 1) % 256
    assert cli._compare(model, tokenizer, ids, tokens) == 1
    assert re.search(r"token 4 of 6 differs .* does NOT explain", capsys.readouterr().err)


def test_compare_accepts_a_token_that_rounding_explains(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    model, _ = from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT.encode())
    tokens = generate(model, [ids], max_new_tokens=6, vocab_size=256)[0].tolist()
    twin = (tokens[4] + 1) % 256
    with torch.no_grad():  # two tokens with equal logits: either is right
        model.lm_head.weight[twin] = model.lm_head.weight[tokens[4]]
    conventional = generate(model, [ids], max_new_tokens=6, window=0, vocab_size=256)[0].tolist()
    at = next(i for i, token in enumerate(conventional) if token in (tokens[4], twin))
    conventional[at] = tokens[4] + twin - conventional[at]
    assert cli._compare(model, ByteTokenizer(), ids, conventional) == 0
    assert re.search(rf"token {at} of 6 differs .*; rounding explains it", capsys.readouterr().err)


def test_a_reader_that_leaves_early_is_no_error(folder: str) -> None:
    command = [sys.executable, "-m", "replayssm", "generate", PROMPT, "--model", folder, "--max-new-tokens", "30"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait() == 0


def test_the_text_is_shown_as_it_comes(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def slowly(*args: object, **options: object) -> Iterator[torch.Tensor]:
        assert options["stream"] is True
        for letter in b"xyz":
            yield torch.tensor([[letter]])
            shown.append(capsys.readouterr().out)  # what the reader has when the next token is not there yet

    monkeypatch.setattr(cli, "generate", slowly)
    assert cli.main(["generate", "ab", "--model", folder, "--max-new-tokens", "3"]) == 0
    assert shown == ["abx", "y", "z"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def figures(text: str, name: str) -> list[float]:
    """The numbers of the one line of a plan that begins with ``name``."""
    (line,) = re.findall(rf"^ *{name} +([\d,. ]+)$", text, re.MULTILINE)
    return [float(figure.replace(",", "")) for figure in line.split()]


@pytest.mark.parametrize(("batch", "drafts"), [(1, 0), (3, 4)])
def test_plan_shows_the_bytes_that_a_cache_of_the_model_holds(
    folder: str, capsys: pytest.CaptureFixture[str], batch: int, drafts: int
) -> None:
    text = planned(capsys, "--model", folder, "--batch", str(batch), "--window", "6", "--drafts", str(drafts))
    model, _ = from_pretrained(folder)
    cache = ReplayStateCache(model, batch, window=6, step_tokens=1 + drafts, backend="triton", device="meta")
    shown = {name: figures(text, name)[0] for name in cache.nbytes_by_part}
    assert shown == {name: nbytes // batch for name, nbytes in cache.nbytes_by_part.items()}
    plain = ReplayStateCache(model, batch, window=6, step_tokens=1 + drafts, backend="torch", device="meta")
    u = 2 * 4 * 2 * 8 * cache.clock.slots  # of the two layers with a delta rule, fp32
    assert shown["ring"] == plain.nbytes_by_part["ring"] // batch + u
    assert figures(text, "total") == [sum(shown.values())]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert figures(text, "weights") == [weights]
    fit = (int(139 * 2**30 * USABLE) - weights) // int(figures(text, "total")[0])
    assert f"{fit:,} sequences fit into 90% of 139 GiB\n" in text


@pytest.mark.parametrize("name", [case.geometry for case in CASES])
def test_plan_predicts_for_each_geometry_of_the_bench_that_replay_moves_less_and_takes_less_time(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = planned(capsys, "--model", name, "--batch", "256", "--window", "16", "--gpu", "H200")
    (case,) = [case for case in CASES if case.geometry == name]
    conventional, replay, ratio = figures(text, "bytes")
    sizes = case.layer_bytes(torch.bfloat16)
    assert conventional == 256 * conventional_step(sizes).moved
    assert replay == 256 * replay_step(sizes, 16).moved
    assert ratio == round(conventional / replay, 2) > 1.5
    before, after, ratio = figures(text, "time, us")
    assert ratio == pytest.approx(before / after, abs=0.01)
    assert ratio > 1.3  # KDA's folds compute as well
    assert figures(text, "checkpoint") == [case.state_bytes]
    assert "Below batch" not in text


def test_plan_with_drafts_compares_the_memory_of_rollback_by_replay_and_by_states(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned(capsys, "--model", folder, "--batch", "3", "--window", "6", "--drafts", "4")
    model, _ = from_pretrained(folder)
    cache = ReplayStateCache(model, 3, window=6, step_tokens=5, backend="triton", device="meta")
    parts = {name: nbytes // 3 for name, nbytes in cache.nbytes_by_part.items()}
    (native,) = re.findall(r"native +([\d,]+)  5 states", text)
    (replay,) = re.findall(r"replay +([\d,]+)  a state, and a ring of 11 tokens", text)
    assert int(native.replace(",", "")) == 5 * parts["checkpoint"]
    assert int(replay.replace(",", "")) == parts["checkpoint"] + parts["ring"]
    assert "can reject 4 drafts" in text
    assert "reject" not in planned(capsys, "--model", folder)


def test_plan_fits_fewer_sequences_on_a_smaller_gpu_and_says_when_the_batch_is_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fitting = []
    for gpu in ("H200", "L40S", "RTX 4090"):
        text = planned(capsys, "--model", "qwen3.5-4b", "--batch", "10000", "--window", "16", "--gpu", gpu)
        (fit,) = re.findall(r"^([\d,]+) sequences fit", text, re.MULTILINE)
        fitting.append(int(fit.replace(",", "")))
        assert ("not this batch" in text) == (fitting[-1] < 10000)
    assert fitting == sorted(fitting, reverse=True)
    assert fitting[-1] < 10000 < fitting[0]


def test_plan_chooses_the_window_of_the_kernels_and_says_that_small_batches_are_not_sure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = planned(capsys, "--model", "qwen3.5-4b")
    assert "batch 1, window 0," in alone
    assert "Below batch 32" in alone
    assert "batch 256, window 16," in planned(capsys, "--model", "nemotron-3-super", "--batch", "256")
    assert "batch 1, window 16, tokens a step 4," in planned(capsys, "--model", "nemotron-3-super", "--drafts", "3")


def test_plan_counts_full_attention_up_to_the_length_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"type": "attention", "nheads": 2, "headdim": 8}
    HybridLM(CONFIG | {"layers": [*CONFIG["layers"], full]}).save_pretrained(tmp_path)
    assert cli.main(["plan", "--model", str(tmp_path)]) == 2
    assert "max_seqlen must be" in capsys.readouterr().err
    short, long = (planned(capsys, "--model", str(tmp_path), "--max-seqlen", length) for length in ("100", "300"))
    assert figures(long, "kv")[0] - figures(short, "kv")[0] == 200 * 2 * 2 * 8 * 4  # k and v, fp32


def test_plan_of_a_model_without_a_recurrent_layer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [entry for entry in CONFIG["layers"] if entry["type"] in ("attention", "mlp")]
    HybridLM(CONFIG | {"layers": layers}).save_pretrained(tmp_path)
    text = planned(capsys, "--model", str(tmp_path))
    assert "nothing to replay" in text
    assert "time, us" not in text


@pytest.mark.parametrize("checkpoint", NAMES)
@pytest.mark.parametrize("read_format", [None, *formats.names()])
def test_plan_knows_the_bytes_of_every_format(
    capsys: pytest.CaptureFixture[str], checkpoint: str, read_format: str | None
) -> None:
    asked = [] if read_format is None else ["--read-format", read_format]
    text = planned(capsys, "--batch", "2", "--checkpoint", checkpoint, *asked)
    sizes = ReplayStateCache.estimate(
        from_pretrained("tiny")[0],
        2,
        window="auto",
        backend="triton",
        checkpoint=checkpoint,
        read_format=read_format,
    )
    for part in ("checkpoint", *(["copy"] if read_format else [])):
        assert figures(text, part) == [sizes[part] // 2]


def test_a_text_can_be_written_with_smaller_states(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """As by the library with the same seed, which is shown; and less is moved."""
    formats = ["--checkpoint", "fp16_sr", "--read-format", "nvfp4"]
    asked = ["generate", "ab", "--model", folder, "--max-new-tokens", "40"]
    assert cli.main([*asked, *formats, "--seed", "5"]) == 0
    narrow = capsys.readouterr()
    assert "seed 5" in narrow.err
    assert cli.main(asked) == 0
    ratio, plain = (float(re.search(r"([0-9.]+)x as much", err)[1]) for err in (narrow.err, capsys.readouterr().err))
    assert ratio > plain
    assert cli.main([*asked, *formats, "--compare"]) == 2
    assert "fp16_sr and nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "abacus"], ["gpu must be one of H200", "got 'abacus'"]),
        (["--model", "no/such/folder"], ["model must be", "qwen3.5-4b", "got 'no/such/folder'"]),
        (["--window", "2", "--drafts", "3"], ["window must be", "step_tokens=4"]),
        (["--batch", f"{10**20}"], ["batch must be", "64 bits"]),
        (["--drafts", f"{10**20}"], ["step_tokens must be", "64 bits"]),
        (["--checkpoint", "fp3"], ["checkpoint must be one of 'fp32'", "got 'fp3'"]),
        (["--read-format", "fp3"], ["read_format must be one of None", "got 'fp3'"]),
    ],
)
def test_plan_refuses_in_one_line_what_the_library_or_the_table_does_not_know(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"replayssm plan: (?!plan: ).+; got .+\. .+\n", printed.err)
    assert all(word in printed.err for word in words)


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"replayssm {replayssm.__version__}\n"
    assert replayssm.__version__ == importlib.metadata.version("replayssm")
    with pytest.raises(AttributeError, match="'replayssm' has no attribute 'version'"):
        _ = replayssm.version


def test_bench_is_a_command_and_times_nothing_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "kernel"]) == 0
    assert "nothing was timed" in " ".join(capsys.readouterr().out.lower().split())


@pytest.mark.parametrize("bench", ["kernel", "verify", "speculative", "prefill", "drift", "hf"])
@pytest.mark.parametrize("out", ["", "folder", "file/there", "file"])
def test_figures_that_could_not_be_written_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bench: str, out: str
) -> None:
    def measured(options: object) -> int:
        raise AssertionError("measured")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(replayssm.bench.command.COMMANDS[bench], "run", measured)
    with pytest.raises(AssertionError if out == "file" else SystemExit, match="measured" if out == "file" else "2"):
        cli.main(["bench", bench, "--out", out])
    assert out == "file" or "--out: must be a file" in capsys.readouterr().err


def test_a_bench_beyond_the_memory_of_the_machine_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "drift", "--tokens", str(10**22)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"replayssm bench: sizes must fit .+; got OverflowError .+\. .+\n", printed.err)
