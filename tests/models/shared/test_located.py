"""Where a checkpoint is, and what it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from segue.messages.errors import ConfigError
from segue.models.registry import family_of, read_config
from segue.models.shared.checkpoint.files import located

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of Hugging Face's hub with one model, `someone/small`."""
    folder = tmp_path / "hub" / "models--someone--small"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_a_directory_is_called_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "v7").mkdir()
    (tmp_path / "current").symlink_to("v7")
    assert located(tmp_path / "current") == ((tmp_path / "v7").resolve(), "current")
    assert located(f"{tmp_path}/v7/../current/") == ((tmp_path / "v7").resolve(), "current")


def test_other_snapshots_are_called_as_they_are_written(tmp_path: Path) -> None:
    step = tmp_path / "run" / "snapshots" / "step-1000"
    step.mkdir(parents=True)
    assert located(step) == (step.resolve(), "step-1000")


def test_folders_of_the_cache_are_called_after_the_model(cache: Path) -> None:
    folder = cache / "models--someone--small"
    snapshot = folder / "snapshots" / COMMIT
    assert located(snapshot) == (snapshot.resolve(), "someone/small")
    assert located(folder) == (snapshot, "someone/small")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ConfigError, match=r"weights.gguf' is a file; a checkpoint is a directory"):
        located(tmp_path / "weights.gguf")
    with pytest.raises(ConfigError, match=r"no checkpoint at '.*missing': that is not a directory$"):
        located(tmp_path / "missing")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/small"}')
    with pytest.raises(ConfigError, match=r"a LoRA adapter and no model: serve .*\(someone/small\).* --lora NAME=DIR"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], r"config.json names no architectures, .* as save_pretrained of a model does"),
        (
            ["VibeVoiceForConditionalGeneration"],
            r"no family serves VibeVoice\w+; of models that speak, served are CSM, ",
        ),
        (["BertModel"], r"no family serves BertModel; served are language models \(...ForCausalLM\), "),
    ],
)
def test_what_no_family_serves(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        family_of({"architectures": names}, tmp_path)


def test_names_are_looked_up_where_the_hub_keeps_them(cache: Path) -> None:
    """By a process of its own: the hub's library reads its environment once."""

    def graph(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "segue.cli", "graph", name],
            env={"HF_HOME": str(cache.parent), "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
            capture_output=True,
            text=True,
            timeout=240,
        )

    there = graph("someone/small")
    assert there.stdout.startswith("causal_lm: "), there.stderr
    missing = graph("someone/large")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert all(fact in missing.stderr for fact in ("'someone/large'", str(cache), "hf download someone/large"))
