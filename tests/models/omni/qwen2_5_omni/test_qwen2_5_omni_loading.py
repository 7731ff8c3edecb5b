"""Each stage takes its own weights from a checkpoint, and says what is wrong with one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_5_omni_family import context, decoder_in, published_of
from safetensors.torch import load_file, save_file

from segue.messages.errors import ConfigError
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniForConditionalGeneration
from segue.models.omni.qwen2_5_omni.loading import (
    load_config,
    load_encoders,
    load_speakers,
    load_talker,
    load_thinker,
    load_token2wav,
)
from segue.models.omni.qwen2_5_omni.talker import Talker
from segue.models.omni.qwen2_5_omni.thinker import Thinker
from segue.models.shared.checkpoint.checkpoint import Checkpoint
from segue.models.shared.omni.reply import load_text_rows

LOADERS: dict[str, Any] = {
    "encoder": load_encoders,
    "thinker": load_thinker,
    "talker": load_talker,
    "vocoder": load_token2wav,
}


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own to break."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "copy"))


@pytest.fixture(scope="session")
def whole(tiny_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors, by published name."""
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(tiny_dir.glob("*.safetensors")):
        state |= load_file(shard)
    return state


def change_config(directory: Path, change: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def single_file(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the shards by one file."""
    for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("stage", LOADERS)
def test_a_stage_gets_the_checkpoints_values(tiny_dir: Path, whole: dict[str, torch.Tensor], stage: str) -> None:
    ctx = context(tiny_dir, stage)
    module = LOADERS[stage](ctx, load_config(ctx))
    state = published_of(stage, module)
    assert state
    for name, tensor in state.items():
        assert torch.equal(tensor, whole[name]), name
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_the_checkpoint_is_sharded_and_all_of_it_is_used_once(tiny_dir: Path, whole: dict[str, torch.Tensor]) -> None:
    assert len(list(tiny_dir.glob("*.safetensors"))) > 1
    ctx = context(tiny_dir, "thinker")
    used = [name for stage, load in LOADERS.items() for name in published_of(stage, load(ctx, load_config(ctx)))]
    assert sorted(used) == sorted(whole)


def test_buffers_are_those_of_the_library(tiny_dir: Path) -> None:
    ctx = context(tiny_dir, "thinker")
    config = load_config(ctx)
    theirs = Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_dir)
    pairs = {
        "thinker": (decoder_in(load_thinker(ctx, config)), decoder_in(theirs.thinker)),
        "encoder": (load_encoders(ctx, config).audio_tower, theirs.thinker.model.audio_tower),
        "vision": (load_encoders(ctx, config).visual, theirs.thinker.model.visual),
        "vocoder": (load_token2wav(ctx, config), theirs.token2wav),
    }
    for what, (mine, library) in pairs.items():
        buffers = dict(library.named_buffers())
        assert buffers, what
        for name, buffer in mine.named_buffers():
            assert torch.equal(buffer, buffers[name]), (what, name)


def test_dtype_is_the_contexts_but_the_vocoders_is_float32(tiny_dir: Path) -> None:
    ctx = context(tiny_dir, "thinker")
    ctx.dtype = torch.bfloat16
    config = load_config(ctx)
    for load in (load_thinker, load_talker):
        assert {p.dtype for p in load(ctx, config).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_token2wav(ctx, config).parameters()} == {torch.float32}
    assert load_text_rows(ctx, config, [1]).dtype == torch.bfloat16


def test_a_checkpoint_saved_by_the_library_loads_the_same(tiny_dir: Path, tmp_path: Path) -> None:
    Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_dir).save_pretrained(tmp_path)
    for stage, load in LOADERS.items():
        first, second = context(tiny_dir, stage), context(tmp_path, stage)
        mine = load(first, load_config(first)).state_dict()
        theirs = load(second, load_config(second)).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_nested_names_of_newer_checkpoints_are_read(copy: Path, whole: dict[str, torch.Tensor]) -> None:
    nested = {}
    for name, tensor in whole.items():
        new = name.replace("thinker.model.", "thinker.model.language_model.")
        nested[
            new.replace("thinker.visual", "thinker.model.visual").replace("thinker.audio", "thinker.model.audio")
        ] = tensor
    single_file(copy, nested)
    ctx = context(copy, "thinker")
    config = load_config(ctx)
    thinker = published_of("thinker", load_thinker(ctx, config))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in thinker.items())
    assert torch.equal(load_text_rows(ctx, config, [5, 3]), whole["thinker.model.embed_tokens.weight"][[5, 3]])
    load_encoders(ctx, config)


def test_text_rows_are_read_as_slices(tiny_dir: Path, whole: dict[str, torch.Tensor]) -> None:
    ctx = context(tiny_dir, "talker")
    ids = [7, 0, 671]
    assert torch.equal(load_text_rows(ctx, load_config(ctx), ids), whole["thinker.model.embed_tokens.weight"][ids])


def test_a_tied_head_is_the_embedding(copy: Path, whole: dict[str, torch.Tensor]) -> None:
    change_config(copy, lambda config: config["thinker_config"].update(tie_word_embeddings=True))
    single_file(copy, {name: tensor for name, tensor in whole.items() if name != "thinker.lm_head.weight"})
    ctx = context(copy, "thinker")
    thinker = load_thinker(ctx, load_config(ctx))
    assert thinker.lm_head.weight is decoder_in(thinker).embed_tokens.weight


@pytest.mark.parametrize("stage", LOADERS)
def test_dummy_weights_are_seeded_and_of_the_right_shape(tiny_dir: Path, tmp_path: Path, stage: str) -> None:
    shutil.copy(tiny_dir / "config.json", tmp_path)
    ctx = context(tmp_path, stage, load_format="dummy")
    config = load_config(ctx)
    first, second = (LOADERS[stage](ctx, config).state_dict() for _ in range(2))
    real = context(tiny_dir, stage)
    shapes = {name: tensor.shape for name, tensor in LOADERS[stage](real, config).state_dict().items()}
    assert {name: tensor.shape for name, tensor in first.items()} == shapes
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert max(float(tensor.float().std()) for tensor in first.values() if tensor.ndim > 1) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_stages_need_only_the_config_and_give_finite_logits(
    tiny_dir: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    shutil.copy(tiny_dir / "config.json", tmp_path)
    for build, stage in ((Thinker, "thinker"), (Talker, "talker")):
        ctx = context(tmp_path, stage, load_format="dummy")
        ctx.dtype = dtype
        adapter = build(ctx)
        hidden = adapter.embed(torch.arange(4), None)
        assert hidden.dtype == dtype
        logits = adapter.logits(hidden)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
    assert list(load_speakers(ctx, load_config(ctx))) == ["Chelsie"]


def test_speakers_are_those_of_the_file_the_default_first(tiny_dir: Path) -> None:
    ctx = context(tiny_dir, "vocoder")
    config = load_config(ctx)
    speakers = load_speakers(ctx, config)
    stored = torch.load(tiny_dir / "spk_dict.pt", weights_only=True)
    assert next(iter(speakers)) == "Chelsie"
    assert set(speakers) == set(stored)
    for name, speaker in speakers.items():
        assert speaker.bos_token == int(stored[name]["bos_token"])
        assert torch.equal(speaker.cond, stored[name]["cond"].float())
        assert torch.equal(speaker.ref_mel, stored[name]["ref_mel"].float())


# --- what can be wrong -----------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(copy: Path, whole: dict[str, torch.Tensor]) -> None:
    lost = "thinker.model.layers.1.mlp.up_proj.weight"
    single_file(copy, {name: tensor for name, tensor in whole.items() if name != lost})
    ctx = context(copy, "thinker")
    with pytest.raises(ConfigError, match=r"1 tensors .* is 'model\.(language_model\.)?layers\.1\.mlp\.up_proj"):
        load_thinker(ctx, load_config(ctx))
    load_talker(ctx, load_config(ctx))  # the loss is nothing to the talker


def test_a_missing_head_without_tying_is_named(copy: Path, whole: dict[str, torch.Tensor]) -> None:
    single_file(copy, {name: tensor for name, tensor in whole.items() if name != "thinker.lm_head.weight"})
    ctx = context(copy, "thinker")
    with pytest.raises(ConfigError, match=r"the first is 'lm_head\.weight'"):
        load_thinker(ctx, load_config(ctx))


def test_a_wrong_shape_names_file_tensor_and_both_shapes(copy: Path, whole: dict[str, torch.Tensor]) -> None:
    name = "talker.codec_head.weight"
    single_file(copy, {**whole, name: whole[name][:-1].clone()})
    ctx = context(copy, "talker")
    with pytest.raises(ConfigError, match=r"'codec_head\.weight' has the shape \(299, 96\); .* must be \(300, 96\)"):
        load_talker(ctx, load_config(ctx))


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        Checkpoint(copy)


def test_a_broken_shard_is_named(copy: Path) -> None:
    shards = sorted(copy.glob("*.safetensors"))
    for shard in shards:
        shard.write_bytes(b"\0" * 64)
    ctx = context(copy, "talker")
    with pytest.raises(ConfigError, match=r"model-0000.*\.safetensors"):
        load_talker(ctx, load_config(ctx))


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json"):
        Checkpoint(copy)


def test_rows_out_of_range(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="row 999"):
        Checkpoint(tiny_dir).read("thinker.model.embed_tokens.weight", rows=[999])
    ctx = context(tiny_dir, "talker")
    with pytest.raises(ConfigError, match="text token 5000"):
        load_text_rows(ctx, load_config(ctx), [5000])


def test_unknown_names_in_the_checkpoint_reader(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tensor 'thinker\.nothing'"):
        Checkpoint(tiny_dir).read("thinker.nothing")


def test_an_unknown_load_format_names_the_nearest(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'dummy'"):
        load_config(context(tiny_dir, "thinker", load_format="dumy"))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(context(tmp_path, "thinker"))


def test_a_config_of_wrong_values(copy: Path) -> None:
    change_config(copy, lambda config: config["talker_config"].update(hidden_size="wide"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(context(copy, "talker"))


@pytest.mark.parametrize("content", [b"nothing", None])
def test_a_missing_or_broken_speaker_file(copy: Path, content: bytes | None) -> None:
    path = copy / "spk_dict.pt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    ctx = context(copy, "talker")
    with pytest.raises(ConfigError, match=r"spk_dict\.pt"):
        load_speakers(ctx, load_config(ctx))


@pytest.mark.parametrize("speakers", [{}, {"A": 3}, {"A": {"cond": torch.zeros(1)}}, [1]])
def test_a_speaker_file_of_another_form(copy: Path, speakers: Any) -> None:
    torch.save(speakers, copy / "spk_dict.pt")
    ctx = context(copy, "talker")
    with pytest.raises(ConfigError, match=r"spk_dict\.pt"):
        load_speakers(ctx, load_config(ctx))


def test_thinker_and_talker_must_agree_on_positions(copy: Path) -> None:
    change_config(copy, lambda config: config["talker_config"].update(position_id_per_seconds=13))
    with pytest.raises(ConfigError, match="position_id_per_seconds is 25, the talker's 13"):
        Talker(context(copy, "talker"))
