"""Thinker and talker with what every language model has: several ranks, fewer bits, LoRA adapters, drafts; and the
published shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head import eagle_drafts
from packed_files import copied
from qwen3_omni_family import BY_NAME, Case, Speech, Stages, context, expected_speech
from rank_process import Second
from safetensors.torch import load_file, save_file

from lora_files import SHARED_CONFIG
from segue.engines.autoregressive.contract import AutoregressiveContext, AutoregressiveModel
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import NotFound
from segue.models.omni.qwen3_omni import loading
from segue.models.omni.qwen3_omni.graph import graph
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration
from segue.models.omni.qwen3_omni.talker import Talker
from segue.models.omni.qwen3_omni.thinker import Thinker
from segue.models.omni.qwen3_omni.tiny.config import ROLES, SHAPES, config_json

SOME = [BY_NAME[name] for name in ("text", "mixed")]
Said = dict[str, tuple[list[int], list[list[int]]]]
"""Name of a case → (reply, rows of codes)."""


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return Stages.of(tiny_dir)


@pytest.fixture(scope="module")
def talker(tiny_dir: Path) -> Talker:
    return Talker(context(tiny_dir, "talker"))


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> Said:
    return answers_of(tiny_dir)


def answers_of(directory: Path, cases: list[Case] = SOME) -> Said:
    """The library's."""
    return {case.name: expected_speech(directory, case)[:2] for case in cases}


def twice(speech: Speech, adapter: str | None = None) -> Said:
    """The answers, equal to those of the same requests again, whose prompts' rows then come from the prefix cache."""
    first, again = (
        {name: (one.reply, one.codes) for name, one in speech(SOME, adapter=adapter).items()} for _ in range(2)
    )
    assert again == first
    return first


def with_thinker(stages: Stages, thinker: AutoregressiveModel) -> Stages:
    return Stages(stages.input, stages.encoder, thinker)  # type: ignore[arg-type]


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_a_thinker_on_two_ranks(tiny_dir: Path, stages: Stages, talker: Talker, expected: Said, second: Second) -> None:
    with second.led(tiny_dir, stage="thinker") as led:
        assert twice(Speech(with_thinker(stages, led), talker, max_tokens_per_step=37)) == expected
        assert led.weight_bytes < stages.thinker.weight_bytes


def test_a_talker_on_two_ranks(tiny_dir: Path, stages: Stages, talker: Talker, expected: Said, second: Second) -> None:
    """Each rank has the whole code predictor; both draw the same codes."""
    with second.led(tiny_dir, stage="talker") as led:
        assert twice(Speech(stages, led, max_tokens_per_step=37)) == expected  # type: ignore[arg-type]
        assert led.weight_bytes < talker.weight_bytes


# --- fewer bits ------------------------------------------------------------------------------------------------------


def test_quantised_on_the_fly(tiny_dir: Path, stages: Stages, talker: Talker) -> None:
    """Answers do not depend on the batch."""
    small = Thinker(context(tiny_dir, "thinker", quantization="int8"))
    small_talker = Talker(context(tiny_dir, "talker", quantization="int8"))
    assert small.weight_bytes < stages.thinker.weight_bytes
    assert small_talker.weight_bytes < talker.weight_bytes
    speech = Speech(with_thinker(stages, small), small_talker)
    together = twice(speech)
    for case in SOME:
        [alone] = speech([case]).values()
        assert (alone.reply, alone.codes) == together[case.name]


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_an_adapter_of_the_thinker(
    tiny_dir: Path, tmp_path: Path, stages: Stages, talker: Talker, expected: Said
) -> None:
    """Trained on the attention of the library's thinker; merged, the library gives the same reply and codes."""
    state = {name: part for file in sorted(tiny_dir.glob("*.safetensors")) for name, part in load_file(file).items()}
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name in sorted(name for name in state if name.startswith("thinker.model.layers.") and "self_attn" in name):
        if not name.endswith("_proj.weight"):
            continue
        down = torch.randn(4, state[name].shape[1], generator=generator)
        up = torch.randn(len(state[name]), 4, generator=generator) * float(state[name].std()) / 4
        layer = "base_model.model." + name.removeprefix("thinker.").removesuffix(".weight")
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        state[name] += 2 * up @ down
    merged = answers_of(copied(tiny_dir, tmp_path / "merged", state))
    assert all(merged[name][0] != expected[name][0] for name in merged)
    (tmp_path / "poet").mkdir()
    written = {**SHARED_CONFIG, "r": 4, "lora_alpha": 8}
    (tmp_path / "poet" / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors, tmp_path / "poet" / "adapter_model.safetensors")
    adapted = Thinker(context(tiny_dir, "thinker", lora=LoraPlan({"poet": str(tmp_path / "poet")})))
    speech = Speech(with_thinker(stages, adapted), talker)
    assert twice(speech, "poet") == merged
    assert twice(speech) == expected
    with pytest.raises(NotFound, match="no LoRA adapter 'poett'; did you mean 'poet'"):
        speech(SOME, adapter="poett")


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_ngram_drafts(stages: Stages, talker: Talker, expected: Said) -> None:
    """Rows of rejected drafts never reach the talker."""
    speech = Speech(stages, talker, Speculation(NgramDrafter(1, 3), 3, adaptive=False))
    assert twice(speech) == expected
    stats = speech.thinker.stats()
    assert stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]


def test_drafts_of_an_eagle_head(
    tiny_dir: Path, stages: Stages, talker: Talker, expected: Said, tmp_path: Path
) -> None:
    thinker = Thinker(context(tiny_dir, "thinker"))  # one of its own: the head hooks its layers
    replies = [reply for reply, _ in expected.values()]
    drafts = eagle_drafts(graph({}), context(tiny_dir, "thinker"), thinker, tmp_path, replies, num_blocks=400)
    speech = Speech(with_thinker(stages, thinker), talker, drafts)
    assert twice(speech) == expected
    stats = speech.thinker.stats()
    assert stats["spec_active"] == 1
    assert 0 < stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]


# --- the published shape ---------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[2] / "published" / "Qwen3-Omni-30B-A3B-Instruct"
LOADERS = {
    "encoder": ("thinker.model.", loading.load_encoders),
    "thinker": ("thinker.", loading.load_thinker),
    "talker": ("talker.", loading.load_talker),
    "vocoder": ("code2wav.", loading.load_code2wav),
}


def test_every_parameter_of_the_published_shape_has_a_home() -> None:
    """30B-A3B, without memory: each tensor of the whole model belongs to exactly one stage."""
    contexts = {
        stage: AutoregressiveContext(PUBLISHED, stage, torch.device("meta"), torch.bfloat16, load_format="dummy")
        for stage in LOADERS
    }
    config = loading.load_config(contexts["thinker"])
    with torch.device("meta"):
        whole = Qwen3OmniMoeForConditionalGeneration(config).state_dict()
    homes: dict[str, torch.Size] = {}
    for stage, (prefix, load) in LOADERS.items():
        own = {f"{prefix}{name}": tensor.shape for name, tensor in load(contexts[stage], config).state_dict().items()}
        assert own
        assert not own.keys() & homes.keys()
        homes |= own
    assert homes == {name: tensor.shape for name, tensor in whole.items()}
    assert sum(shape.numel() for shape in homes.values()) / 1e9 == pytest.approx(35.26, abs=0.01)


WIDTHS = (
    "hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "d_model",
    "encoder_ffn_dim",
    "downsample_hidden_size",
    "output_dim",
    "out_hidden_size",
    "decoder_dim",
    "thinker_hidden_size",
)
LAYERS = ("num_hidden_layers", "encoder_layers", "depth", "accept_hidden_layer")
SAME = (
    "num_experts",
    "num_experts_per_tok",
    "num_code_groups",
    "num_quantizers",
    "codebook_size",
    "upsample_rates",
    "upsampling_ratios",
    "sliding_window",
    "position_id_per_seconds",
)


@pytest.mark.parametrize(("size", "by"), [("small", 8), ("medium", 4)])
def test_benchmark_sizes_are_the_published_shape_made_narrower(size: str, by: int) -> None:
    published = json.loads((PUBLISHED / "config.json").read_text())
    found = config_json(SHAPES[size], dict.fromkeys(ROLES, 0))
    compared = dict.fromkeys((*WIDTHS, *LAYERS, *SAME), 0)

    def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        for key, value in ours.items():
            if isinstance(value, dict) and key in theirs and key != "speaker_id":
                compare(value, theirs[key])
            if key not in compared or (wanted := theirs.get(key)) is None:
                continue
            compared[key] += 1
            if key in WIDTHS:
                assert value * by == wanted, key
            elif key in LAYERS:
                assert value == round(wanted / 4), key
            else:
                assert value == wanted, key
        heads, wide = ours.get("num_attention_heads"), ours.get("head_dim")
        if heads and wide:
            assert heads * wide * by == theirs["num_attention_heads"] * theirs["head_dim"]
            assert ours["num_key_value_heads"] * wide * by == theirs["num_key_value_heads"] * theirs["head_dim"]

    compare(found, published)
    assert all(compared.values()), compared
