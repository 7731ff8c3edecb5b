"""`segue bench`: arguments, and the checkpoints they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.bench.main import main, parser
from segue.bench.omni.checkpoint import make_preset, make_shape, overlay
from segue.bench.omni.families import FAMILIES
from segue.cli.main import main as segue

pytestmark = pytest.mark.slow


def test_the_defaults_are_the_benchmark_of_record() -> None:
    arguments = parser().parse_args(["omni"])
    assert arguments.concurrency == [1, 8]
    assert arguments.baseline == ["one", "static"]
    assert (arguments.device, arguments.load_format, arguments.seed) == ("cpu", "auto", 0)
    assert (arguments.assets / "photo.jpg").is_file()


def test_lists_are_read() -> None:
    arguments = parser().parse_args(["omni", "--concurrency", "1, 4,8", "--baseline", "static"])
    assert arguments.concurrency == [1, 4, 8]
    assert arguments.baseline == ["static"]
    assert parser().parse_args(["omni", "--baseline", "none"]).baseline == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["omni", "--concurrency", "0"], "'0' must be a whole number above 0"),
        (["omni", "--concurrency", "1,x"], "'x' must be a whole number above 0"),
        (["omni", "--requests", "-3"], "must be a whole number above 0"),
        (["omni", "--baseline", "statik"], "there is no baseline 'statik'; did you mean 'static'?"),
        (["omni", "--rates", "0.1,0"], "'0.1,0' must be numbers above 0"),
        (["omni", "--size", "big"], "invalid choice: 'big'"),
        (["omni", "--size", "tiny", "--model", "x"], "not allowed with argument"),
        (["omny"], "invalid choice: 'omny'"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_hop_has_arguments_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hop", "--help"])
    assert ended.value.code == 0
    assert "the cost of a hop between workers" in capsys.readouterr().out


def test_a_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert segue(["bench", "omni", "--model", str(tmp_path / "none"), "--baseline", "none"]) == 2
    assert "segue: error: no checkpoint at" in capsys.readouterr().err


def test_a_preset_goes_with_no_other_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert segue(["bench", "omni", "--preset", "qwen3-omni", "--shape", "7b"]) == 2
    assert "--preset goes with --size" in capsys.readouterr().err


def test_a_preset_is_made_once(tmp_path: Path) -> None:
    made = make_preset(tmp_path, "tiny")
    config = made / "config.json"
    config.write_text(config.read_text() + "\n")
    before = config.read_bytes()
    assert make_preset(tmp_path, "tiny") == made
    assert config.read_bytes() == before


def test_the_published_shape_has_its_dimensions_and_the_presets_tokens(tmp_path: Path) -> None:
    made = make_shape(tmp_path, "7b")
    config = json.loads((made / "config.json").read_text())
    text, talker = config["thinker_config"]["text_config"], config["talker_config"]
    assert (text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]) == (3584, 28, 152064)
    assert text["hidden_size"] // text["num_attention_heads"] == 2 * sum(text["rope_scaling"]["mrope_section"])
    assert talker["embedding_size"] == text["hidden_size"]
    assert config["thinker_config"]["image_token_index"] == talker["image_token_index"]
    assert not list(made.glob("*.safetensors*"))
    assert {"tokenizer.json", "preprocessor_config.json", "spk_dict.pt"} <= {path.name for path in made.iterdir()}
    suppressed = FAMILIES["qwen2_5_omni"].suppressed(config)
    assert suppressed.talker[0] == config["token2wav_config"]["dit_config"]["num_embeds"]
    assert set(suppressed.talker_ends) <= set(suppressed.talker)


def test_the_published_shape_is_the_published_model(tmp_path: Path) -> None:
    """On the meta device: as many parameters as Qwen2.5-Omni-7B has."""
    import torch

    from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    config = Qwen2_5OmniConfig.from_pretrained(make_shape(tmp_path, "7b"))
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    assert 10.4e9 < sum(parameter.numel() for parameter in model.parameters()) < 11.0e9


def test_overlay_merges_objects_and_replaces_the_rest() -> None:
    below = {"a": {"b": 1, "c": [1, 2]}, "rope_scaling": {"old": 1}, "d": 4}
    found = overlay(below, {"a": {"c": [3]}, "rope_scaling": {"new": 2}})
    assert found == {"a": {"b": 1, "c": [3]}, "rope_scaling": {"new": 2}, "d": 4}
    assert below["a"] == {"b": 1, "c": [1, 2]}
