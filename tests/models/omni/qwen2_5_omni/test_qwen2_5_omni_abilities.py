"""Thinker and talker with what every language model has: several ranks, fewer bits, LoRA adapters, drafts, replayed
steps. Replies and codes are compared with `generate`, together with captured rows and prefix hits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eagle_head import eagle_drafts
from packed_files import Packed, awq, compressed, copied, write
from qwen2_5_omni_family import (
    CASES,
    Answer,
    Ask,
    Case,
    Pipeline,
    context,
    input_payload,
    processed,
    published_name,
    reference_answer,
)
from rank_process import Second
from safetensors.torch import load_file, save_file

from lora_files import SHARED_CONFIG
from segue.engines.autoregressive.contract import FlatBatch
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan, stage_overrides
from segue.graph.deployment.options import LoraPlan
from segue.kernels.attention.paged_attention import library_attention
from segue.kernels.graphs.compiled import compile_layers
from segue.messages.errors import ConfigError, NotFound
from segue.models.omni.qwen2_5_omni.encoder import Encoder
from segue.models.omni.qwen2_5_omni.graph import graph
from segue.models.omni.qwen2_5_omni.loading import load_config, load_thinker
from segue.models.omni.qwen2_5_omni.talker import Talker
from segue.models.omni.qwen2_5_omni.thinker import Thinker

Codes = tuple[list[int], list[int]]
SOME = [case for case in CASES if case.name in ("text", "image", "video with sound")]


@pytest.fixture(scope="module")
def encoder(tiny_dir: Path) -> Encoder:
    return Encoder(context(tiny_dir, "encoder"))


@pytest.fixture(scope="module")
def thinker(tiny_dir: Path) -> Thinker:
    return Thinker(context(tiny_dir, "thinker"))


@pytest.fixture(scope="module")
def talker(tiny_dir: Path) -> Talker:
    return Talker(context(tiny_dir, "talker"))


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[Codes]:
    return answers_of(tiny_dir)


def answers_of(directory: Path, cases: list[Case] = SOME) -> list[Codes]:
    """The library's replies and codes."""
    return [reference_answer(directory, processed(directory, case), case) for case in cases]


def asks(directory: Path, adapter: str | None = None) -> list[Ask]:
    return [Ask(input_payload(processed(directory, case), case), adapter=adapter) for case in SOME]


def said(answers: list[Answer]) -> list[Codes]:
    return [(answer.reply, [code for sent in answer.spoken for code in sent["codes"].tolist()]) for answer in answers]


def twice(pipeline: Pipeline, asked: list[Ask]) -> list[Codes]:
    """The answers, equal to those of the same requests again, whose prompts' rows then come from the prefix cache."""
    first = said(pipeline.run(asked))
    again = pipeline.run(asked)
    assert said(again) == first
    assert all(answer.cached_tokens for answer in again)
    return first


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # as in test_qwen3_omni_abilities
def test_a_thinker_on_two_ranks(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker, expected: list[Codes], second: Second
) -> None:
    with second.led(tiny_dir, stage="thinker") as led:
        assert twice(Pipeline(encoder, led, talker, max_tokens_per_step=37), asks(tiny_dir)) == expected
        assert led.weight_bytes < thinker.weight_bytes
        assert 2 * led.kv.kv_heads == thinker.kv.kv_heads


@pytest.mark.nightly  # as in test_qwen3_omni_abilities
def test_a_talker_on_two_ranks(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker, expected: list[Codes], second: Second
) -> None:
    with second.led(tiny_dir, stage="talker") as led:
        assert twice(Pipeline(encoder, thinker, led, max_tokens_per_step=37), asks(tiny_dir)) == expected
        assert led.weight_bytes < talker.weight_bytes
        assert 2 * led.kv.kv_heads == talker.kv.kv_heads


# --- fewer bits ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits(stage: Thinker | Talker) -> torch.Tensor:
    """[200, vocab] of a text of ids that both stages have, under the library's own masks."""
    ids = (torch.arange(200) * 7919 + 1) % 290
    with library_attention():
        batch = FlatBatch(ids, None, torch.arange(200)[None], None, [(None, 0, 200)])
        hidden, _ = stage.forward(stage.embed(ids, None), batch)
    return stage.logits(hidden)


@pytest.mark.parametrize(("quantization", "least"), [("bfloat16", 0.8), ("int8", 0.65)])
def test_quantised_on_the_fly(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker, quantization: str, least: float
) -> None:
    """Of 200 tokens, the likeliest next one is mostly the same (tiny random networks are near ties); the answers do not
    depend on the batch."""
    small_thinker = Thinker(context(tiny_dir, "thinker", quantization=quantization))
    small_talker = Talker(context(tiny_dir, "talker", quantization=quantization))
    for small, exact in ((small_thinker, thinker), (small_talker, talker)):
        same = (logits(small).argmax(1) == logits(exact).argmax(1)).float().mean()
        assert least < same < 1
        assert small.weight_bytes < exact.weight_bytes
    pipeline = Pipeline(encoder, small_thinker, small_talker)
    together = twice(pipeline, asks(tiny_dir))
    assert together == [said(pipeline.run([ask]))[0] for ask in asks(tiny_dir)]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PACKED_INTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*lm_head", "re:.*visual.*", "re:.*audio_tower.*", "re:talker.*", "re:token2wav.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


@pytest.mark.parametrize(
    ("written", "parts"),
    [pytest.param(PACKED_INTS, "thinker.", marks=pytest.mark.nightly), (AWQ, ("thinker.", "talker."))],
)
def test_a_quantised_checkpoint(
    tiny_dir: Path, tmp_path: Path, thinker: Thinker, written: dict[str, object], parts: str | tuple[str, ...]
) -> None:
    def pack(layer: str, weight: torch.Tensor) -> Packed | None:
        if not layer.startswith(parts) or "model.layers." not in layer:
            return None
        return awq(weight) if written is AWQ else compressed(weight)

    packed, plain = write(tiny_dir, tmp_path, pack, written)
    encoder = Encoder(context(packed, "encoder"))
    small = Thinker(context(packed, "thinker"))
    assert small.weight_bytes < 0.8 * thinker.weight_bytes
    pipeline = Pipeline(encoder, small, Talker(context(packed, "talker")))
    assert twice(pipeline, asks(packed)) == answers_of(plain)
    with pytest.raises(ConfigError, match="quantised already") as caught:
        Thinker(context(packed, "thinker", quantization="int8"))
    assert caught.value.field == "quantization"
    if parts == "thinker.":  # the talker is plain: it may be quantised
        Talker(context(packed, "talker", quantization="int8"))


# --- LoRA ------------------------------------------------------------------------------------------------------------

NAMES: dict[str, Callable[[str], str]] = {
    "the thinker": lambda name: name,
    "an older thinker": lambda name: name.replace("model.language_model.", "model."),
    "the whole model": lambda name: published_name(f"thinker.{name}"),
}
"""What the adapter was trained on → the name of a layer in its file, of today's name in the thinker."""


class Adapter:
    """A LoRA adapter of the thinker, and the checkpoint in which it is merged."""

    def __init__(self, base: Path, directory: Path) -> None:
        ctx = context(base, "thinker")
        state = {name: part for file in sorted(base.glob("*.safetensors")) for name, part in load_file(file).items()}
        generator = torch.Generator().manual_seed(5)
        self._directory = directory
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, module in load_thinker(ctx, load_config(ctx)).named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                rows, columns = module.weight.shape
                down = torch.randn(4, columns, generator=generator)
                up = torch.randn(rows, 4, generator=generator) * float(module.weight.std()) / 8
                self._pairs[name] = down, up
                state[published_name(f"thinker.{name}.weight")] += 2 * up @ down
        self.merged = copied(base, directory / "merged", state)

    def file(self, trained_on: str) -> str:
        target = self._directory / trained_on
        target.mkdir()
        (target / "adapter_config.json").write_text(json.dumps({**SHARED_CONFIG, "r": 4, "lora_alpha": 8}))
        tensors = {
            f"base_model.model.{NAMES[trained_on](name)}.lora_{which}.weight": tensor
            for name, pair in self._pairs.items()
            for which, tensor in zip("AB", pair, strict=True)
        }
        save_file(tensors, target / "adapter_model.safetensors")
        return str(target)


@pytest.fixture(scope="module")
def adapter(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return Adapter(tiny_dir, tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize("trained_on", NAMES)
def test_an_adapter_of_the_thinker(
    tiny_dir: Path, encoder: Encoder, talker: Talker, expected: list[Codes], adapter: Adapter, trained_on: str
) -> None:
    """In one batch with requests that have none."""
    adapted = Thinker(context(tiny_dir, "thinker", lora=LoraPlan({"poet": adapter.file(trained_on)})))
    merged = answers_of(adapter.merged)
    assert all(with_it != without for with_it, without in zip(merged, expected, strict=True))
    both = twice(Pipeline(encoder, adapted, talker, num_blocks=800), [*asks(tiny_dir, "poet"), *asks(tiny_dir)])
    assert both == [*merged, *expected]
    with pytest.raises(NotFound, match="no LoRA adapter 'poett'; did you mean 'poet'"):
        Pipeline(encoder, adapted, talker).run(asks(tiny_dir, "poett"))


# --- drafts and replayed steps ---------------------------------------------------------------------------------------


def test_ngram_drafts(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker, expected: list[Codes]
) -> None:
    """Rows of rejected drafts never reach the talker."""
    speculation = Speculation(NgramDrafter(1, 3), 3, adaptive=False)
    pipeline = Pipeline(encoder, thinker, talker, speculation=speculation)
    assert twice(pipeline, asks(tiny_dir)) == expected
    stats = pipeline.thinker.stats()
    assert 0 < stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]


def test_drafts_of_an_eagle_head(
    tiny_dir: Path, encoder: Encoder, talker: Talker, expected: list[Codes], tmp_path: Path
) -> None:
    thinker = Thinker(context(tiny_dir, "thinker"))  # one of its own: the head hooks its layers
    replies = [reply for reply, _ in expected]
    drafts = eagle_drafts(graph({}), context(tiny_dir, "thinker"), thinker, tmp_path, replies, num_blocks=400)
    pipeline = Pipeline(encoder, thinker, talker, speculation=drafts)
    assert twice(pipeline, asks(tiny_dir)) == expected
    stats = pipeline.thinker.stats()
    assert stats["spec_active"] == 1
    assert 0 < stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]


def test_replayed_steps(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker, expected: list[Codes]
) -> None:
    pipeline = Pipeline(encoder, thinker, talker)
    with torch.inference_mode():
        for engine in (pipeline.thinker, pipeline.talker):
            engine.warm_up()
    assert twice(pipeline, asks(tiny_dir)) == expected
    for engine in (pipeline.thinker, pipeline.talker):
        assert engine.stats()["recorded_steps_total"] > 20


# --- the deployment --------------------------------------------------------------------------------------------------

LAPTOP = Hardware(4, 8 << 30)
SPECULATION = {"method": "ngram"}


@pytest.mark.parametrize(("key", "value"), [("speculation", SPECULATION), ("lora", {})])
def test_keys_that_a_talker_does_not_have(key: str, value: object) -> None:
    """As defaults they are the thinker's."""
    stages = load_plan(graph({}), hardware=LAPTOP, overrides=stage_overrides(None, **{key: value})).stages  # type: ignore[arg-type]
    assert getattr(stages["thinker"], key) is not None
    assert getattr(stages["talker"], key) is None
    with pytest.raises(ConfigError, match=rf"stages\.talker\.{key} is set, but stage 'talker'.*does not support it"):
        load_plan(graph({}), {"stages": {"talker": {key: value}}}, hardware=LAPTOP)


def test_both_can_be_divided() -> None:
    said = {"encoder": {"fuse_with": None}, "thinker": {"tensor_parallel": 2}, "talker": {"tensor_parallel": 2}}
    stages = load_plan(graph({}), {"stages": said}, hardware=LAPTOP).stages
    assert stages["thinker"].ranks == stages["talker"].ranks == 2


# --- compiled layers -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_compiled_layers(
    tiny_dir: Path, encoder: Encoder, expected: list[Codes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.compiler.reset()  # what other models of this process have compiled counts against a limit of variants
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    thinker = Thinker(context(tiny_dir, "thinker", fused=False))
    talker = Talker(context(tiny_dir, "talker", fused=False))
    for stage_model in (thinker, talker):
        assert compile_layers(stage_model.library_decoder, "cpu") > 1
    pipeline = Pipeline(encoder, thinker, talker, max_tokens_per_step=37, enforce_eager=True)
    assert twice(pipeline, asks(tiny_dir)) == expected
    assert any(tmp_path.rglob("*.so")), "something was compiled"
