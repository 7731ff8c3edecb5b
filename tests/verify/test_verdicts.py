"""What is equal, what is a tie and what is different; and which passes fit into memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.messages.reference import Followed, LibraryAnswer, Pixels
from segue.models.shared.reference import Follow
from segue.orchestrator.omni.outputs import RequestOutput
from segue.verify.compare import TOLERANCES, Row, audio, compared, ids, pixels, tokens, vector
from segue.verify.fits import GiB, Pass, passes
from segue.verify.questions import Question
from segue.verify.report import DIFFERENT, EQUAL, NOT_RUN, LeftOut, status_of
from segue.verify.segue_side import ALONE, Served, deployment
from segue.verify.subject import Subject, read_subject

NEEDS = {
    ("cpu", "float32"): int(4 * 7_100_000_000 * 1.35) + 2 * GiB,
    ("cpu", "bfloat16"): int(2 * 7_100_000_000 * 1.35) + 2 * GiB,
    ("cuda", "float32"): int(4 * 7_100_000_000 * 1.15) + 2 * GiB,
    ("cuda", "bfloat16"): int(2 * 7_100_000_000 * 1.15) + 2 * GiB,
}
STRICT, HALF = TOLERANCES["float32"], TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("best", "margins", "verdict", "figure"),
    [
        ([5, 6, 7], [0.0, 0.0, 0.0], "equal", "3 tokens"),
        ([5, 9, 7], [0.0, 0.2, 0.0], "tie", "1 of 3 tokens, first at 1, margin 0.2"),
        ([5, 9, 7], [0.0, 0.9, 0.0], "DIFFERENT", "token 1 of 3: the library's is likelier by 0.9"),
        ([5, 9, 8], [0.0, 0.2, math.inf], "DIFFERENT", "token 2 of 3: the library's is likelier by inf"),
        ([5, 6, 7, 8], [0.0, 0.0, 0.0], "DIFFERENT", "the library goes on after 3 tokens, Segue has 3"),
        ([5, 6], [0.0, 0.0], "DIFFERENT", "the library ends after 2 tokens, Segue has 3"),
    ],
)
def test_a_reply(best: list[int], margins: list[float], verdict: str, figure: str) -> None:
    found = tokens([5, 6, 7], Followed("llm", best, margins), [], HALF)
    assert (found["verdict"], found["figure"]) == (verdict, figure)


def test_a_near_tie_is_none_in_float32_and_equal_tokens_need_equal_logprobs() -> None:
    assert tokens([5], Followed("llm", [6], [0.2]), [], STRICT)["verdict"] == "DIFFERENT"
    followed = Followed("llm", [5], [0.0], [-0.5])
    assert tokens([5], followed, [-0.5001], STRICT)["verdict"] == "equal"
    assert tokens([5], followed, [-0.6], STRICT)["verdict"] == "DIFFERENT"
    two = Followed("llm", [5, 6], [0.0, 0.0], [-0.5, -0.5])
    assert tokens([5, 6], two, [-0.5, math.nan], HALF)["verdict"] == "DIFFERENT"


def test_rounding_is_small_on_average_and_ties_are_few() -> None:
    given = list(range(1, 49))
    follow = Followed("llm", given, [0.0] * 48, [-1.0] * 48)
    assert tokens(given, follow, [-1.05] * 47 + [-1.49], HALF)["verdict"] == "equal"
    assert "0.49 on average" in tokens(given, follow, [-1.49] * 48, HALF)["figure"]
    for ties, verdict in ((12, "tie"), (13, "DIFFERENT"), (48, "DIFFERENT")):
        best = [0] * ties + given[ties:]
        margins = [0.45] * ties + [0.0] * (48 - ties)
        assert tokens(given, Followed("llm", best, margins), [], HALF)["verdict"] == verdict


def test_an_answer_that_says_nothing_is_no_equality() -> None:
    for shape in ((4, 4, 3), (2, 4, 4, 3)):
        for colour in ((0, 0, 0), (255, 0, 9)):
            flat = np.broadcast_to(np.uint8(colour), shape)
            assert pixels([flat], [Pixels(shape, flat.tobytes())], HALF)["verdict"] == "FAILED"
    for samples in (np.zeros(0, np.float32), np.zeros(99, np.float32), np.full(99, np.nan, np.float32)):
        assert audio(samples, samples, HALF)["verdict"] == "FAILED"
    for numbers in (np.float32([]), np.float32([0, 0]), np.float32([np.nan, 1])):
        assert vector(numbers, numbers, HALF)["verdict"] == "FAILED"
    led = Follow([0, 0])
    for _ in range(2):
        led(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 8), math.nan))
    assert tokens([0, 0], led.followed("llm", 2), [], HALF)["figure"] == (
        "the library gave scores that are no numbers, first at token 0"
    )
    assert tokens([], Followed("llm", [], []), [], HALF)["verdict"] == "FAILED"
    short = tokens([5, 6], Followed("llm", [5, 6], [0.0, 0.0], [-1.0, -1.0]), [-1.0], HALF)
    assert (short["verdict"], short["error"]) == ("FAILED", 0.0)


def test_outputs_that_the_library_did_not_give(tiny_dir: Path) -> None:
    """The graph gives audio, and Segue made codes; the answer has the text alone."""
    output = RequestOutput("r", token_ids={"thinker": [5], "talker": [7]})
    served = Served(Question("short text", {}), outputs={ALONE: output})
    answer = LibraryAnswer(index=0, followed=[Followed("thinker", [5], [0.0])])
    rows = compared(read_subject(tiny_dir), "bfloat16", served, {ALONE: answer}, None)
    assert {(row.stage, row.kind): row.verdict for row in rows} == {
        ("talker", "codes"): "FAILED",
        ("vocoder", "audio"): "FAILED",
        ("thinker", "tokens"): "equal",
    }


def test_prompts_audio_pixels_and_vectors() -> None:
    assert ids([1, 2], [1, 2])["verdict"] == "equal"
    assert ids([1, 2], [1, 3, 2])["figure"] == "from index 1: 2 ids, the library has 3"
    tone = np.sin(np.arange(1000) / 9).astype(np.float32)
    for mine, verdict in ((tone * 1.001, "equal"), (tone * 1.1, "DIFFERENT"), (tone[:-1], "DIFFERENT")):
        assert audio(mine, tone, STRICT)["verdict"] == verdict
    assert audio(tone * np.nan, tone, HALF)["verdict"] == "DIFFERENT"
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    theirs = [Pixels(image.shape, image.tobytes())]
    spot = image.copy()
    spot[0, 0, 0] += 3
    for mine, verdict in ((image, "equal"), (spot, "DIFFERENT"), (image + 1, "DIFFERENT"), (image[:2], "DIFFERENT")):
        assert pixels([mine], theirs, STRICT)["verdict"] == verdict
    assert vector(np.float32([1, 2]), np.float32([1, 2.01]), STRICT)["verdict"] == "DIFFERENT"
    assert vector(np.float32([1, 2]), np.float32([1, 2.01]), HALF)["verdict"] == "equal"


def test_the_status_of_a_run() -> None:
    def rows(*verdicts: str) -> list[Row]:
        of = {"stage": "", "kind": "", "question": "", "dtype": "", "served": "", "figure": ""}
        return [Row(verdict=verdict, **of) for verdict in verdicts]  # type: ignore[arg-type]

    assert status_of(rows("equal", "tie", "skipped")) == EQUAL
    assert status_of(rows("equal", "FAILED", "DIFFERENT")) == DIFFERENT
    for not_run in (rows("equal", "FAILED"), rows("skipped"), []):
        assert status_of(not_run) == NOT_RUN
    left_out = [LeftOut("float32", "needs about 40.0 GiB")]
    assert status_of(rows("equal"), left_out) == NOT_RUN
    assert status_of(rows("equal", "DIFFERENT"), left_out) == DIFFERENT


def test_what_does_not_fit_is_left_out_with_the_reason(tiny_dir: Path) -> None:
    subject = read_subject(tiny_dir)
    gpu = Hardware(8, 64 * GiB, (3 * GiB,))
    both = passes(subject, gpu, "cuda", ["bfloat16", "float32"])
    assert [one.left_out for one in both] == [None, None]
    [left] = passes(subject, Hardware(8, 64 * GiB, (GiB,)), "cuda", ["float32"])
    assert left.left_out is not None
    assert "1.0 GiB of GPU memory; --device cpu --dtype float32" in left.left_out
    assert subject.weight_bytes("float32") == 2 * subject.weight_bytes("bfloat16")


def test_of_several_gpus_segue_uses_as_many_as_a_stage_has_ranks(tiny_dir: Path) -> None:
    subject = sized(read_subject(tiny_dir), 7_100_000_000)
    four = Hardware(8, 8 * GiB, (24 * GiB, 24 * GiB, 16 * GiB, 24 * GiB))
    for ranks, fits in ((1, False), (2, True)):
        [one] = passes(subject, four, "cuda", ["bfloat16"], ranks)
        assert (one.left_out is None) == fits
        if one.left_out is not None:
            assert "16.0 GiB of GPU memory on 1 of 4 GPUs; --tensor-parallel" in one.left_out


def sized(subject: Subject, floats: int) -> Subject:
    """The same with so many weights, in the same proportions."""
    by_part = {name: count * floats // subject.floats for name, count in subject.floats_by_part.items()}
    return replace(subject, floats=floats, floats_by_part=by_part)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("device", "memory", "dtype"),
    [("cpu", 64, "float32"), ("cpu", 32, "bfloat16"), ("cuda", 40, "float32"), ("cuda", 18, "bfloat16")],
)
def test_a_pass_that_fits_leaves_segue_room_for_weights_and_cache(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, device: str, memory: int, dtype: str, several: bool
) -> None:
    """7.1 billion weights: the plan's promise, and what each stage's worker gets of the memory."""
    subject = sized(read_subject(tiny_dir), 7_100_000_000)
    if not several:  # as of a model whose weights name no stage
        subject = replace(subject, floats_by_part={}, graph=one_stage())
    size = memory * GiB
    hardware = Hardware(8, size if device == "cpu" else 8 * GiB, () if device == "cpu" else (size,))
    monkeypatch.setattr("segue.verify.fits.available_memory", lambda hardware: hardware.memory_bytes)
    assert passes(subject, hardware, device, [dtype]) == [Pass(dtype, needs := NEEDS[device, dtype], None)]
    plan = load_plan(subject.graph, deployment(subject, hardware, device, dtype), hardware=hardware)
    stages = [stage for stage in plan.stages.values() if stage.engine == "autoregressive"]
    assert len(stages) == 1 + several
    for stage in stages:
        assert stage.memory_bytes > 1.05 * subject.stage_bytes(stage.name, dtype)
    assert sum(stage.memory_bytes for stage in stages) < max(needs, 0.9 * size)


def one_stage() -> StageGraph:
    graph = StageGraph("one")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    return graph


def weights(folder: Path, name: str, count: int) -> None:
    folder.mkdir(exist_ok=True)
    save_file({f"of.{name}": np.zeros(count, np.float16)}, folder / name)


def test_weights_are_counted_once_from_the_files_that_are_loaded(tmp_path: Path, tiny_dir: Path) -> None:
    """The published layouts of a language model with a copy in one file, and of a pipeline with single files beside its
    folders, a sharded text encoder and half-precision copies."""
    mistral = tmp_path / "mistral"
    weights(mistral, "consolidated.safetensors", 30)
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        weights(mistral, shard, 15)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (mistral / "model.safetensors.index.json").write_text(json.dumps(index))
    (mistral / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"]}))
    assert read_subject(mistral).floats == 30

    flux = tmp_path / "flux"
    weights(flux, "flux1-dev.safetensors", 100)
    weights(flux / "transformer", "diffusion_pytorch_model.safetensors", 100)
    weights(flux / "transformer", "diffusion_pytorch_model.fp16.safetensors", 100)
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        weights(flux / "text_encoder_2", shard, 15)
    (flux / "text_encoder_2" / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(flux / "vae", "diffusion_pytorch_model.fp16.safetensors", 7)
    weights(flux / "vae_other", "diffusion_pytorch_model.safetensors", 1000)
    weights(flux / "safety_checker", "model.safetensors", 1000)
    components = {
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "safety_checker": [None, None],
    }
    (flux / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **components}))
    subject = read_subject(flux)
    assert (subject.floats, len(subject.files)) == (137, 4)


def test_what_is_no_checkpoint(tmp_path: Path, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        read_subject(tmp_path / "none")
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="no safetensors files"):
        read_subject(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        read_subject(tmp_path)
