"""The packages of docs/own-model.md, as they stand there: a recurrent captioner and a second head give what their
authors' own loops give."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markdown_blocks import ROOT, blocks

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import StageRequest
from segue.messages.request import Message, Request
from segue.messages.sampling import SamplingParams, merged
from segue.messages.tensors import tensor_part
from segue.models.shared.library import PreTrainedModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every file that the page shows."""
    at = tmp_path_factory.mktemp("own")
    for block in blocks(ROOT / "docs" / "own-model.md"):
        if block.marks[:1] and (file := block.marks[0].partition("file=")[2]):
            (at / file).parent.mkdir(exist_ok=True)
            (at / file).write_text(block.body)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(at))
        yield at
    for name in [name for name in sys.modules if name.partition(".")[0] == "captions"]:
        del sys.modules[name]


def image(seed: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def context(directory: Path, stage: str) -> AutoregressiveContext:
    return AutoregressiveContext(directory, stage, CPU, torch.float32)


def outputs(model: Any, payloads: list[Any], most: int | None = None) -> list[list[list[int]]]:
    """Through the engine at once, in small steps: the rows of each request, or its ids as rows of one."""
    engine = AutoregressiveEngine(model, AutoregressiveConfig(num_blocks=64, block_size=4, max_tokens_per_step=5))
    made: dict[str, list[list[int]]] = {}
    for number, payload in enumerate(payloads):
        name, request = str(number), Request(request_id=str(number))
        sampling = merged(request=SamplingParams(max_tokens=most), family=model.default_sampling)
        upstream, made[name] = frozenset({"input"}), []
        engine.add(StageRequest(name, "writer", request, sampling, 7, upstream, frozenset(), frozenset()))
        engine.feed(name, "input", payload, final=True)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            made[output.request_id] += output.codes or [[token] for token in output.token_ids]
    return list(made.values())


def test_the_captioner_writes_what_its_author_s_loop_writes(tmp_path: Path) -> None:
    from captions.family import FAMILY
    from captions.model import Captions, CaptionsConfig

    torch.manual_seed(9)
    author = Captions(CaptionsConfig())
    with torch.no_grad():
        for name, parameter in author.named_parameters():
            parameter.mul_(5 if "gru" in name else 20)  # so that captions depend on the image
        author.head.bias[2] += 3  # and end
    author.eval().save_pretrained(tmp_path)
    FAMILY.graph({}).validate()
    stages: Any = FAMILY.load_stages()
    pictures = [image(seed, 32) for seed in (0, 1, 2, 1)]
    pixels = [torch.from_numpy(np.moveaxis(picture, -1, 0) / np.float32(127.5) - 1) for picture in pictures]
    expected = [author.caption(one) for one in pixels]
    assert len({tuple(ids) for ids in expected}) == 3
    assert len({len(ids) for ids in expected}) > 1, "captions end by themselves"
    input_stage = stages.STAGE_MODELS["input"](context(tmp_path, "input"))
    parts = [tensor_part(picture, "image", "image") for picture in pictures]
    payloads = [input_stage.process(Request(request_id="one", messages=[Message("user", [part])])) for part in parts]
    made = outputs(stages.STAGE_MODELS["writer"](context(tmp_path, "writer")), payloads)
    assert [[row[0] for row in rows] for rows in made] == expected


def test_a_second_head_draws_with_the_first(tmp_path: Path) -> None:
    from captions.two_heads import TwoHeads
    from transformers import LlamaConfig, LlamaModel
    from transformers.modeling_outputs import CausalLMOutput

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}

    class Author(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.trunk = LlamaModel(config)
            self.words_head = torch.nn.Linear(32, 80)
            self.tone_head = torch.nn.Linear(32, 5)
            self.post_init()

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.trunk.embed_tokens

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
            hidden = self.trunk(input_ids, use_cache=False).last_hidden_state
            return CausalLMOutput(logits=self.words_head(hidden))

    torch.manual_seed(0)
    author = Author(LlamaConfig(vocab_size=80, initializer_range=0.3, max_position_embeddings=128, **sizes)).eval()
    author.save_pretrained(tmp_path)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, rows = list(prompt), []
            for _ in range(9):
                hidden = author.trunk(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
                rows.append([int(author.words_head(hidden).argmax()), int(author.tone_head(hidden).argmax())])
                ids.append(rows[-1][0])
            expected.append(rows)
    assert len({tone for rows in expected for _, tone in rows}) > 1
    served = TwoHeads(context(tmp_path, "writer"), author)
    made = outputs(served, [{"token_ids": torch.tensor(prompt)} for prompt in prompts], most=9)
    assert made == expected
