"""Files of a checkpoint that are JSON, but not what the library makes of them: named, and never a mistake of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from causal_lm_family import load

from segue.cli.main import main
from segue.engines.contract import LoadContext
from segue.graph.stage_graph import StageGraph
from segue.kernels.kv.store import lazy_zeros
from segue.messages.errors import ConfigError
from segue.models.registry import family_of
from segue.models.shared.checkpoint.files import check_files
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.generation import generation_of
from segue.models.shared.text.chat_template import read_chat_template
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.text.causal_lm import tiny
from segue.orchestrator.omni.async_omni import AsyncOmni

INDEX = "model.safetensors.index.json"
NO_OBJECTS = ["[]", "5", "null", '"x"']


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    tiny.make("qwen3", directory)
    return directory


@pytest.fixture
def copy(qwen: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen, tmp_path / "qwen"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", NO_OBJECTS)
def test_a_tokenizer_that_is_no_object(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}: must hold a JSON object"):
        load_tokenizer(copy)


def test_a_tokenizer_of_no_known_form(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="the tokenizer cannot be read: "):
        load_tokenizer(copy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not an index of safetensors shards"),
        *((text, "not an index of safetensors shards") for text in NO_OBJECTS),
        ("{}", "weight_map"),
        ('{"weight_map": 5}', "not an index of safetensors shards"),
        ('{"weight_map": {"a": 5}}', "not an index of safetensors shards"),
        ('{"metadata": {}, "weight_map": {}}', "names no tensors"),
        ('{"metadata": {}, "weight_map": {"model.norm.weight": "../x"}}', "names '../x', which is not there"),
    ],
)
def test_an_index_that_is_none(copy: Path, text: str, says: str) -> None:
    (copy / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=rf"index\.json.*{says}"):
        load(copy)


def test_an_index_without_what_the_library_reads(copy: Path) -> None:
    files = json.loads((copy / INDEX).read_text())["weight_map"]
    (copy / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match=r"index\.json: has no object 'metadata'"):
        load(copy)


def test_a_template_that_is_no_text(copy: Path) -> None:
    (copy / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read: 'utf-8' codec"):
        read_chat_template(copy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"line 2 \('\{\{ m\.content \}'\): unexpected '\}'"),
        ("{{ messages | shout }}", "line 1 .*: No filter named 'shout'"),
    ],
)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_is_none(copy: Path, name: str, text: str, says: str) -> None:
    where = rf"chat_template\.jinja: {says}"
    if name.endswith("json"):
        where, text = rf"tokenizer_config\.json: chat_template: {says}", json.dumps({"chat_template": text})
    (copy / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{where}.*; it must be a Jinja template"):
        AsyncOmni(copy)


def test_a_template_of_another_type(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template is '5'; it must be text"):
        read_chat_template(copy)


@pytest.mark.parametrize("length", [0, 1, -5])
def test_a_length_that_leaves_no_room(copy: Path, length: int) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    says = rf"config\.json: max_position_embeddings is {length}; it must be the number of tokens"
    with pytest.raises(ConfigError, match=says):
        AsyncOmni(copy)
    with pytest.raises(ConfigError, match=says):
        load(copy)


def test_a_length_of_a_part_that_writes() -> None:
    """Named by where it stands; of parts without a vocabulary it may be anything."""
    graph = StageGraph("two")
    graph.stage("writer", "autoregressive", takes={"text"}, gives={"text"})
    eyes = {"vision_config": {"max_position_embeddings": 0}}
    check_files(Path("/nowhere"), eyes, graph)
    with pytest.raises(ConfigError, match=r"config\.json: talker\.text\.n_positions is 0"):
        check_files(Path("/nowhere"), {**eyes, "talker": {"text": {"vocab_size": 9, "n_positions": 0}}}, graph)


def test_the_graph_of_a_checkpoint_that_cannot_be_served(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "generation_config.json").write_text('{"top_p": 7}')
    assert main(["graph", str(copy)]) == 2
    assert "generation_config.json: top_p is 7" in capsys.readouterr().err
    (copy / "generation_config.json").unlink()
    assert main(["graph", str(copy)]) == 0
    (copy / "chat_template.jinja").write_text("{% if %}")
    assert main(["graph", str(copy)]) == 2
    assert "chat_template.jinja: line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": "x"}, "temperature is 'x'; it must be a number"),
        ({"temperature": -5}, "temperature is -5; it must be a number from 0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a number from 0"),
        ({"top_p": 7}, "top_p is 7; it must be a number from 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number above 0"),
        ({"do_sample": "no"}, "do_sample is 'no'; it must be true or false"),
        ({"top_k": True}, "top_k is True; it must be an integer"),
        ({"top_k": 3.5}, "top_k is 3.5; it must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be an integer from 1"),
        ({"eos_token_id": "no"}, "eos_token_id is 'no'; it must be a token id"),
        ({"eos_token_id": [5, [1]]}, r"eos_token_id is \[5, \[1\]\]; it must be a token id"),
        ({"suppress_tokens": ["a"]}, r"suppress_tokens is \['a'\]"),
    ],
)
def test_values_of_another_type_among_those_of_generation(copy: Path, values: dict[str, object], says: str) -> None:
    """Told by the control plane, and by the worker that would go by them."""
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, **values}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {says}"):
        AsyncOmni(copy)
    config = load_config(LoadContext(copy, "llm", torch.device("cpu"), torch.float32))
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        generation_of(copy, config)


def test_suppressed_tokens_that_there_are_not(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5, 99999]}))
    with pytest.raises(ConfigError, match=r"suppress_tokens is \[5, 99999\]; .* from 0 to 671"):
        load(copy)


@pytest.mark.parametrize("text", NO_OBJECTS)
def test_a_config_of_generation_that_is_no_object(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: must hold a JSON object"):
        load(copy)


@pytest.mark.parametrize(
    ("name", "value"), [("num_attention_heads", 0), ("num_key_value_heads", 0), ("vocab_size", 10)]
)
def test_sizes_that_make_no_network(copy: Path, name: str, value: int) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ConfigError, match="the weights cannot be loaded: "):
        load(copy)


@pytest.mark.parametrize("wrong", [[5], [["a"]], "LlamaForCausalLM", {"a": 1}])
def test_architectures_that_are_no_names(copy: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="it must be the name of a class"):
        family_of({"architectures": wrong}, copy)


def test_a_number_format_that_there_is_not(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "dtype": "float12"}))
    with pytest.raises(ConfigError, match=r"config\.json: .*float12"):
        load(copy)


@pytest.mark.parametrize("blocks", [2**55, 2**70])
def test_a_cache_for_which_there_is_no_memory(blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"there is no memory for .* set fewer kv_blocks"):
        lazy_zeros((blocks, 16), torch.float32, torch.device("cpu"))
