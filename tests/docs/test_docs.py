"""What the documentation says is true: blocks are parsed or run, tables are checked against the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from markdown_blocks import ALL, PAGES, ROOT, Block, anchors, links, names, of, rows

from segue.bench.main import parser as bench_parser
from segue.cli.main import parser as cli_parser
from segue.connectors.create import KEYS as CONNECTOR_KEYS
from segue.connectors.create import Network, create
from segue.connectors.shm.connector import CUDA_POOL_BYTES, MAX_BYTES, POOL_BYTES, THRESHOLD_BYTES
from segue.connectors.tcp import connector as tcp
from segue.graph.deployment.deployment import Hardware, Limits
from segue.graph.deployment.loader import load_plan
from segue.graph.deployment.written import LIMIT_KEYS, MOVE_KEYS, SCALING_KEYS, TOP_KEYS, stage_keys
from segue.graph.kinds.autoregressive import AUTOREGRESSIVE
from segue.graph.kinds.module import MODULE
from segue.graph.kinds.registry import kinds
from segue.graph.plan.wiring import KINDS
from segue.graph.render import as_text
from segue.graph.stage_graph import StageGraph
from segue.messages import errors, wire
from segue.messages.diffusion import PARAMETERS, DiffusionParams
from segue.messages.errors import ConfigError, SegueError
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.qwen2_5_omni.graph import graph as omni_graph
from segue.models.shared.dialects.dialect import CALL_FORMATS, Dialect
from segue.models.shared.text.chat_template import ChatTemplate
from segue.models.speech.speech_seq2seq.facts import OPTIONS as SPEECH_OPTIONS
from segue.orchestrator.omni.outputs import RequestOutput
from segue.orchestrator.service import ModelCard
from segue.server.anthropic.request import MessagesBody
from segue.server.generation.parameters import CommonBody
from segue.server.http import errors as server_errors
from segue.server.http.middleware import OPEN
from segue.server.openai.audio.request import TranscriptionBody, TranslationBody
from segue.server.openai.audio.speech_request import SpeechBody
from segue.server.openai.chat.request import ChatBody, chat_request
from segue.server.openai.completions.request import CompletionBody
from segue.server.openai.images.request import EditBody, ImageBody, PaintingBody
from segue.server.openai.responses.request import ResponsesBody
from segue.server.openai.videos.request import VideoBody
from segue.server.settings import ServerSettings
from segue.server.tenants.keys_file import KEYS, read_keys
from segue.server.vllm.pooling import ClassifyBody, PoolingBody
from segue.server.vllm.scores import RerankBody, ScoreBody

DOCS = ROOT / "docs"
MODEL = "out/qwen2.5-omni-tiny"
"""The checkpoint as the documentation calls it."""
SHAPES = "examples/segue-shapes"
"""That of the README."""
POSTED = ("/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
"""Where a request shown goes that is no chat completion."""
FILES = (
    *("segue_mine/family.py", "segue_mine/stages.py"),  # test_docs_packages.py
    *(
        "captions/model.py",
        "captions/family.py",
        "captions/stages.py",
        "captions/two_heads.py",
    ),  # test_docs_own_model.py
)
"""Files of packages that are shown."""
TWO_GPUS = Hardware(cpus=16, memory_bytes=64 << 30, gpus=(80 << 30, 80 << 30))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def each(found: list[Block]) -> pytest.MarkDecorator:
    assert found
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture(scope="module")
def graph() -> StageGraph:
    return omni_graph({})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks as the repository does, with the checkpoint of the pages in out/."""
    home = tmp_path_factory.mktemp("docs")
    for name in ("assets", "examples"):
        (home / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "segue.cli", "tiny", "qwen2.5-omni", MODEL],
        cwd=home,
        env=environment(),
        check=True,
        capture_output=True,
    )
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[str]:
    """URL of a server of the checkpoint."""
    with serving(home, MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def shapes(home: Path) -> Iterator[str]:
    """URL of a server of the README's checkpoint."""
    with serving(home, SHAPES) as url:
        yield url


@contextmanager
def serving(home: Path, model: str) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "segue.cli", "serve", model, "--port", "0", "--log-level", "error"],
        cwd=home,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"segue: {Path(model).name} is served at http://"), line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


# ── pages and links ────────────────────────────────────────────────────────────────────────────────────────────────


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_is_reached_from_the_readme() -> None:
    readme = ROOT / "README.md"
    assert {(ROOT / link.partition("#")[0]).resolve() for link in links(readme)} >= set(PAGES) - {readme}


@each([block for block in ALL if block.language not in {"text", "mermaid"}])
def test_marks_are_known(block: Block) -> None:
    """A misspelt mark would leave an example untested."""
    known: dict[str, set[tuple[str, ...]]] = {
        "python": {(), ("run",), ("run", "server"), *((f"file={path}",) for path in FILES)},
        "yaml": {("deployment",), ("keys",)},
        "json": {("request",), *(("request", path) for path in POSTED), ("answer",), ("error",)},
        "sh": {()},
        "toml": {()},
        "": {()},
    }
    marks = block.marks[:1] if block.marks[:1] == ("answer",) else block.marks
    assert marks in known[block.language]


# ── deployments ────────────────────────────────────────────────────────────────────────────────────────────────────


@each(of("yaml", "deployment"))
def test_deployments_load(graph: StageGraph, block: Block) -> None:
    values = yaml.safe_load(block.body)
    plan = load_plan(graph, values, hardware=TWO_GPUS)
    assert plan != load_plan(graph, hardware=TWO_GPUS), "the example changes nothing"


@pytest.mark.parametrize(("place", "gpus"), [(0, (40 << 30,)), (1, (24 << 30, 24 << 30))])
def test_deployments_of_gpus_hold_the_published_weights(graph: StageGraph, place: int, gpus: tuple[int, ...]) -> None:
    """Qwen2.5-Omni-7B, billions of parameters by stage: bfloat16, but for the vocoder, which is float32."""
    blocks = [block for block in of("yaml", "deployment") if block.page.name == "deployment.md"]
    plan = load_plan(graph, yaml.safe_load(blocks[place].body), hardware=Hardware(16, 128 << 30, gpus))
    weights = {"thinker": 7.62 * 2, "encoder": 1.31 * 2, "talker": 1.35 * 2, "vocoder": 0.45 * 4}
    for name, gigabytes in weights.items():
        stage = plan.stages[name]
        assert stage.devices[0].startswith("cuda:")
        assert stage.dtype == "bfloat16"
        assert stage.memory_bytes > 1.1 * gigabytes * 1e9, name
    assert plan.stages["thinker"].compile


def test_every_key_of_a_deployment_is_documented() -> None:
    page = DOCS / "deployment.md"
    titles = ("### Top level", "### A stage", "### An edge", "### A connector", "### Limits", "### Moves")
    listed = {
        title: [name for row in rows(page, title) for name in names(row[0])]
        for title in (*titles, "### Replicas by load")
    }
    assert sorted(listed["### Top level"]) == sorted(TOP_KEYS)
    of_stages = [*stage_keys(), "input_connectors", "output_connectors", "stage_id", "stage_name"]
    assert sorted(listed["### A stage"]) == sorted(of_stages)
    assert sorted(listed["### Limits"]) == sorted(LIMIT_KEYS)
    assert sorted(listed["### Moves"]) == sorted(MOVE_KEYS)
    assert sorted(listed["### Replicas by load"]) == sorted(SCALING_KEYS)
    assert listed["### An edge"] == ["from", "to", "connector", "budget", "start", "wire"]
    assert listed["### A connector"][:2] == ["name", "extra"]
    worked_out = {"name", "engine", "memory_bytes", "sequence_ring", "scaling"}
    planned = {field.name for kind in kinds().values() for field in fields(kind.plan)}
    assert planned - worked_out <= set(of_stages)


def test_settings_of_connectors_are_as_documented() -> None:
    written = {names(row[0])[0]: row for row in rows(DOCS / "deployment.md", "### A connector")}
    assert names(written["name"][2]) == list(KINDS)
    extra = {key: written[key] for key in written if key not in ("name", "extra")}
    of_tcp = ("inline_threshold_bytes", "max_bytes")
    of_mooncake = {name for key in list(extra)[5:] for name in names(written[key][0])}
    of_others = {key for kind in ("mooncake_engine", "mooncake_store", "nixl") for key in CONNECTOR_KEYS[kind]}
    assert of_mooncake == of_others - {*of_tcp}
    extra = dict(list(extra.items())[:5])
    of_shm = dict.fromkeys(extra.keys() - {"inline_threshold_bytes"}, 1 << 16)
    create("shm", "docs-settings", of_shm).close()
    create("tcp", "", dict.fromkeys(of_tcp, 1 << 16), network=Network("127.0.0.1", bytes(32))).close()
    defaults = {
        "inline_threshold_bytes": tcp.THRESHOLD_BYTES,
        "shm_threshold_bytes": THRESHOLD_BYTES,
        "pool_bytes": POOL_BYTES,
        "max_bytes": MAX_BYTES,
        "cuda_pool_bytes": CUDA_POOL_BYTES,
    }
    assert {key: names(row[1])[0] for key, row in extra.items()} == {key: size(n) for key, n in defaults.items()}


def size(count: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        number = count / 1024 ** {"KiB": 1, "MiB": 2, "GiB": 3}[unit]
        if number >= 1:
            return f"{number:g}{unit}"
    return str(count)


def test_documented_defaults_are_the_defaults(graph: StageGraph) -> None:
    page = DOCS / "deployment.md"
    limits = {names(row[0])[0]: yaml.safe_load(names(row[1])[0]) for row in rows(page, "### Limits")}
    assert load_plan(graph, {"limits": limits}, hardware=TWO_GPUS).limits == Limits()
    stage = {names(row[0])[0]: row[1].strip("`") for row in rows(page, "### A stage") if len(names(row[0])) == 1}
    plan = load_plan(graph, hardware=TWO_GPUS).stages["thinker"]
    assert (int(stage["block_size"]), yaml.safe_load(stage["prefix_caching"])) == (plan.block_size, plan.prefix_caching)
    assert stage["max_tokens_per_step"] == "512 on a CPU, 2048 on a GPU"
    assert plan.max_tokens_per_step == 2048
    assert load_plan(graph, hardware=Hardware(2, 1 << 34)).stages["thinker"].max_tokens_per_step == 512
    assert stage["max_batch"] == "64 autoregressive, 16 diffusion, 16 module"
    assert (plan.max_batch, load_plan(graph, hardware=TWO_GPUS).stages["vocoder"].max_batch) == (64, 16)


def test_keys_of_one_kind_of_stage_stand_apart(graph: StageGraph) -> None:
    text = (DOCS / "deployment.md").read_text()
    module, _, section = text.partition("For module stages")[2].partition("For autoregressive stages only:")
    assert set(MODULE.keys) <= set(names(module))
    assert set(AUTOREGRESSIVE.keys) <= set(names(section.partition("###")[0]))
    with pytest.raises(ConfigError, match="autoregressive"):
        load_plan(graph, {"stages": {"vocoder": {"block_size": 16}}}, hardware=TWO_GPUS)


def test_the_printed_graph_is_the_one_shown(graph: StageGraph) -> None:
    [shown] = [block for block in of("text") if block.body.startswith("qwen2_5_omni: takes")]
    assert as_text(load_plan(graph, hardware=Hardware(cpus=2, memory_bytes=16 << 30))) == shown.body + "\n"


# ── commands ───────────────────────────────────────────────────────────────────────────────────────────────────────


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in of("sh"):
        for line in block.body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if not block.body.startswith("curl") else []
            if words:
                found.append((str(block), words))
    return found


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda value: " ".join(value) if value else None)
def test_commands_are_understood(where: str, words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] in ("vllm", "lm_eval", "nvidia-smi", "hf", "python"):  # other people's
        return
    if words[0] == "pip":
        assert (ROOT / words[-1] / "pyproject.toml").is_file()
        return
    assert words[0] == "segue", where
    if words[1] == "bench":
        assert bench_parser().parse_args(words[2:]).command == words[2]
        return
    assert cli_parser().parse_args(words[1:]).command == words[1]


def test_options_of_serve_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli_parser().parse_args(["serve", "--help"])
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    listed = {name for row in rows(DOCS / "api.md", "# HTTP API") for name in names(row[0])}
    assert listed == options - {"--help"}


# ── HTTP ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CARD = ModelCard(
    name="qwen2.5-omni-tiny",
    family="qwen2_5_omni",
    takes=frozenset({"text", "image", "audio", "video"}),
    gives=frozenset({"text", "audio"}),
    text_stage="thinker",
    sampling_stages=["thinker", "talker"],
    stages=["input", "encoder", "thinker", "talker", "vocoder"],
    voices=["Chelsie", "Ethan"],
    options=frozenset({"use_audio_in_video"}),
    max_model_len=None,
    created=0,
)


TOOL_CARD = msgspec.structs.replace(CARD, dialect=Dialect(ChatTemplate("{{ tools }}"), CALL_FORMATS["hermes"]))


def curl_body(block: Block) -> dict[str, Any]:
    words = shlex.split(block.body.replace("\\\n", " "))
    return json.loads(words[words.index("-d") + 1])


def shape(value: Any) -> Any:
    """What of a JSON value an example and a true answer share: names and kinds."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@each([block for block in of("json", "request") if block.marks == ("request",)])
def test_request_bodies_are_accepted(block: Block) -> None:
    assert chat_request(json.loads(block.body), TOOL_CARD, ServerSettings()).requests


def test_curl_bodies_are_answered(server: str, shapes: str) -> None:
    bodies = [block for block in of("sh") if block.body.startswith("curl") and " -d " in block.body]
    found = [(block, block.body.partition("http://localhost:8000")[2].split()[0]) for block in bodies]
    chats = [(block, path) for block, path in found if path == "/v1/chat/completions"]
    assert chats
    for block, path in chats:
        url = shapes if block.page.name == "README.md" else server
        assert fetch(url + path, curl_body(block))["choices"][0]["message"]["content"]


def test_curl_forms_have_what_there_is() -> None:
    found = [block for block in of("sh") if block.body.startswith("curl") and " -F " in block.body]
    assert found
    for block in found:
        path = block.body.partition("http://localhost:8000")[2].split()[0]
        assert path == "/v1/audio/transcriptions"
        words = shlex.split(block.body)
        form = dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "-F")
        assert form.keys() <= {field.name for field in msgspec.structs.fields(TranscriptionBody)}
        assert (ROOT / form["file"].removeprefix("@")).is_file()


def answered() -> list[tuple[Block, str, dict[str, Any] | None]]:
    """Answers with what they answer: the path they name, or the request shown before them (of chat, or of its path)."""
    path, last = "", None
    found: list[tuple[Block, str, dict[str, Any] | None]] = []
    for block in ALL:
        if block.language == "json" and block.marks[:1] == ("request",):
            path, last = (*block.marks[1:], "/v1/chat/completions")[0], json.loads(block.body)
        elif block.language == "json" and block.marks[:1] == ("answer",):
            found.append((block, block.marks[1], None) if len(block.marks) > 1 else (block, path, last))
    return found


@pytest.mark.parametrize(("block", "path", "request_body"), answered(), ids=lambda value: str(value)[:20])
def test_answers_have_the_documented_form(
    server: str, block: Block, path: str, request_body: dict[str, Any] | None
) -> None:
    assert shape(fetch(server + path, request_body)) == shape(json.loads(block.body))


def test_every_parameter_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "### Parameters") for name in names(row[0])]
    assert sorted(listed) == sorted(ChatBody.__struct_fields__)


def test_every_parameter_of_completions_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Completions") for name in names(row[0])]
    own = set(CompletionBody.__struct_fields__) - set(CommonBody.__struct_fields__)
    assert sorted(listed) == sorted(own | {"max_tokens"})


def test_every_parameter_of_responses_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Responses") for name in names(row[0])]
    assert sorted(listed) == sorted(ResponsesBody.__struct_fields__)


def test_every_parameter_of_messages_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Anthropic's messages") for name in names(row[0])]
    assert sorted(listed) == sorted(MessagesBody.__struct_fields__)


def test_every_parameter_of_scores_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Scores") for name in names(row[0])]
    assert set(listed) == {*ScoreBody.__struct_fields__, *RerankBody.__struct_fields__}


def test_every_parameter_of_classes_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Classes") for name in names(row[0])]
    assert sorted(listed) == sorted(ClassifyBody.__struct_fields__)
    of_pooling = [name for row in rows(DOCS / "api.md", "### Pooling") for name in names(row[0])]
    assert sorted(of_pooling) == sorted(set(PoolingBody.__struct_fields__) - set(ClassifyBody.__struct_fields__))


def test_every_parameter_of_speech_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Speech") for name in names(row[0])]
    assert sorted(listed) == sorted(SpeechBody.__struct_fields__)


def test_every_parameter_of_recordings_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Transcriptions") for name in names(row[0])]
    assert sorted(listed) == sorted(TranscriptionBody.__struct_fields__)
    assert set(TranscriptionBody.__struct_fields__) - set(TranslationBody.__struct_fields__) == {
        "timestamp_granularities"
    }
    options = [name for row in rows(DOCS / "python.md", "### Transcription") for name in names(row[0])]
    assert sorted(options) == sorted(SPEECH_OPTIONS)


def test_every_parameter_of_images_is_documented() -> None:
    listed = [name for row in rows(DOCS / "api.md", "## Images") for name in names(row[0])]
    of_pipelines = set(DiffusionParams.__struct_fields__) - {"progress", "partial_images"}
    assert sorted(listed) == sorted(set(ImageBody.__struct_fields__) - of_pipelines)
    of_edits = [name for row in rows(DOCS / "api.md", "### Editing images") for name in names(row[0])]
    of_videos = {name for row in rows(DOCS / "api.md", "## Videos") for name in names(row[0])}
    assert set(VideoBody.__struct_fields__) - set(PaintingBody.__struct_fields__) <= of_videos
    assert sorted(of_edits) == sorted(set(EditBody.__struct_fields__) - set(ImageBody.__struct_fields__))


def test_every_endpoint_is_documented(server: str) -> None:
    listed = {tuple(name.split()) for row in rows(DOCS / "api.md", "## Endpoints") for name in names(row[0])}
    paths = fetch(f"{server}/openapi.json")["paths"]
    assert listed == {(method.upper(), path) for path, operations in paths.items() for method in operations}


def test_what_is_open_without_a_key_is_what_is_written() -> None:
    listed = [name for row in rows(DOCS / "security.md", "## Keys") for name in names(row[0]) if name.startswith("/")]
    assert sorted(listed) == sorted(OPEN)


def test_the_file_of_keys_is_one(tmp_path: Path) -> None:
    [block] = of("yaml", "keys")
    (tmp_path / "keys.yaml").write_text(block.body)
    (tmp_path / "keys.yaml").chmod(0o600)
    assert [tenant.name for tenant in read_keys(tmp_path / "keys.yaml")] == ["alice", "bob"]
    listed = [name for row in rows(DOCS / "security.md", "### Tenants") for name in names(row[0])]
    assert sorted(listed) == sorted(KEYS)


def subclasses(kind: type[SegueError]) -> set[type[SegueError]]:
    return {kind}.union(*(subclasses(below) for below in kind.__subclasses__()))


def test_every_error_is_in_the_table() -> None:
    written = {names(row[2])[0]: row for row in rows(DOCS / "api.md", "## Errors") if names(row[2])}
    kinds = {kind for kind in subclasses(SegueError) if kind.__module__ in (errors.__name__, server_errors.__name__)}
    assert set(written) == {kind.__name__ for kind in kinds}
    for kind in kinds:
        assert written[kind.__name__][:2] == [str(kind.status), f"`{kind.code}`"]


def test_the_error_shown_is_the_one_given() -> None:
    [block] = of("json", "error")
    shown = json.loads(block.body)["error"]
    with pytest.raises(SegueError) as caught:
        chat_request({"model": CARD.name, "messages": [], "temperatur": 1}, CARD, ServerSettings())
    assert server_errors.error_body(caught.value)["error"] == shown


def test_every_metric_is_documented(server: str) -> None:
    fetch(f"{server}/v1/chat/completions", {"model": CARD.name, "messages": [{"role": "user", "content": "Hi"}]})
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        text = answer.read().decode()
    given = {name for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) if not name.endswith("_created")}
    listed = {name for row in rows(DOCS / "operations.md", "## Metrics") for name in names(row[0])}
    assert given == listed


# ── Python ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@each(of("python"))
def test_python_is_python(block: Block) -> None:
    compile(block.body, str(block), "exec")


@pytest.mark.parametrize("page", sorted({block.page for block in of("python", "run")}), ids=lambda page: page.name)
def test_python_runs(page: Path, home: Path, server: str, shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marked blocks of a page, one after the other in one namespace, as a reader would type them."""
    monkeypatch.chdir(home)
    namespace: dict[str, Any] = {"__name__": "docs"}
    url = shapes if page.name == "README.md" else server
    for block in of("python", "run"):
        if block.page == page:
            source = block.body.replace("localhost:8000", url.removeprefix("http://"))
            exec(compile(source, str(block), "exec"), namespace)
    if page.name == "README.md":
        out = namespace["out"]
        assert isinstance(out, RequestOutput)
        assert out.audio is not None
        assert len(out.audio.samples) == 1920 * (len(out.token_ids["talker"]) - 1) - 555
        assert len(namespace["speech"]) > 0
    if page.name == "api.md":
        assert len(namespace["audio"]) > 0  # of the websocket


def test_every_sampling_field_is_documented() -> None:
    table = rows(DOCS / "python.md", "### Sampling")
    assert sorted(names(row[0])[0] for row in table) == sorted(SamplingParams.__struct_fields__)
    neutral = {names(row[0])[0]: row[2] for row in table}
    for name, written in neutral.items():
        value = getattr(FALLBACK, name)
        if isinstance(value, int | float):
            assert yaml.safe_load(written) == value, name


def test_every_parameter_of_an_image_is_documented() -> None:
    listed = {name for row in rows(DOCS / "python.md", "### Images and video") for name in names(row[0])}
    assert listed - {"image"} == PARAMETERS


def test_every_field_of_an_output_is_documented() -> None:
    listed = [names(row[0])[0] for row in rows(DOCS / "python.md", "## Outputs")]
    assert sorted(listed) == sorted(field.name for field in fields(RequestOutput))


# ── the rest ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_message_is_in_the_table() -> None:
    listed = {name for row in rows(DOCS / "architecture.md", "## Messages") for name in names(row[1])}
    kinds = {*wire.ToWorker.__args__, *wire.ToOrchestrator.__args__}
    assert listed == {kind.__name__ for kind in kinds}


def test_the_rooms_are_the_rooms() -> None:
    [tree] = [block for block in of("text") if block.body.startswith("src/segue/\n")]
    listed = {line.split()[0].rstrip("/") for line in tree.body.splitlines()[1:]}
    source = ROOT / "src" / "segue"
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert listed == packages
