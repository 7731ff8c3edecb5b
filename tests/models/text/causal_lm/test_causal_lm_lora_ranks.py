"""LoRA adapters of a model that two processes divide: each request gets what transformers gives with its own merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal_lm_family import Served, add, generate, make, prompts
from rank_process import Second

from lora_files import make_adapter, merge
from segue.kernels.linear.lora import Pair, Share
from segue.messages.errors import ConfigError, NotFound
from segue.messages.sampling import FALLBACK, SamplingParams

PROMPTS = prompts()[:18:3]
TOKENS = 10
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS).over(FALLBACK)
NAMES: tuple[str | None, ...] = ("wide", None, "narrow")
TARGETS = {
    "llama": (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), ("o_proj", "v_proj")),
    "olmo": (("q_proj", "v_proj", "o_proj"), ("k_proj", "down_proj")),  # its plan gathers the heads
    "phi3": (("qkv_proj", "gate_up_proj"), ("o_proj", "down_proj")),  # two layers in one, cut piece by piece
}


class Home:
    """A checkpoint, two adapters for it, and what transformers gives with each of them and without."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.base = make(kind, directory / "base")
        wide, narrow = TARGETS[kind]
        self.paths = {
            "wide": str(make_adapter(self.base, directory / "wide", wide, rank=8, seed=1)),
            "narrow": str(make_adapter(self.base, directory / "narrow", narrow, rank=3, seed=2)),
        }
        merged = {name: merge(self.base, Path(path), directory / f"{name}-m") for name, path in self.paths.items()}
        self.expected: dict[str | None, list[list[int]]] = {
            name: generate(where, PROMPTS, TOKENS) for name, where in ({None: self.base} | merged).items()
        }
        for one, other in (("wide", None), ("narrow", None), ("wide", "narrow")):
            assert self.expected[one] != self.expected[other], "the adapters must matter"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Home]:
    return {kind: Home(kind, tmp_path_factory.mktemp(kind)) for kind in TARGETS}


def finish(served: Served) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while served.engine.has_work():
        for output in served.engine.step():
            assert output.error is None, output.error
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        served.engine.audit()
    return answers


@pytest.mark.parametrize("kind", TARGETS)
def test_two_equal_one(kind: str, homes: dict[str, Home], second: Second) -> None:
    """Every prompt with every adapter and without, in one batch, with prefill in pieces, and again with hits."""
    home = homes[kind]
    with second.led(home.base, lora=home.paths) as led:
        served = Served(led, max_tokens_per_step=48)
        for _ in range(2):
            for place, prompt in enumerate(PROMPTS):
                for name in NAMES:
                    add(served, f"{name}/{place}", name, prompt, PARAMS)
            expected = {
                f"{name}/{place}": home.expected[name][place] for name in NAMES for place in range(len(PROMPTS))
            }
            assert finish(served) == expected
        assert served.engine.stats()["prefix_hit_tokens_total"] > 0


def test_loaded_and_unloaded_while_requests_run(homes: dict[str, Home], second: Second) -> None:
    home = homes["llama"]
    with second.led(home.base, lora={}) as led:
        served = Served(led)
        assert led.lora is not None
        add(served, "none", None, PROMPTS[0], PARAMS)
        first = served.engine.step()
        led.lora.load("poet", home.paths["wide"])
        add(served, "first", "poet", PROMPTS[1], PARAMS)
        first += served.engine.step()
        led.lora.unload("poet")  # whoever has it keeps it, here and there
        with pytest.raises(NotFound, match="no LoRA adapter 'poet'"):
            add(served, "late", "poet", PROMPTS[1], PARAMS)
        with pytest.raises(ConfigError, match="is no LoRA adapter"):
            led.lora.load("poet", home.paths["wide"] + "-no")  # the other rank hears nothing of it
        led.lora.load("poet", home.paths["narrow"])
        add(served, "second", "poet", PROMPTS[2], PARAMS)
        answers = finish(served)
        for output in reversed(first):
            answers[output.request_id] = output.token_ids + answers[output.request_id]
        assert answers == {
            "none": home.expected[None][0],
            "first": home.expected["wide"][1],
            "second": home.expected["narrow"][2],
        }
        add(served, "after", "poet", PROMPTS[3], PARAMS)
        assert finish(served) == {"after": home.expected["narrow"][3]}


def test_shares_of_an_adapter_add_up() -> None:
    draw = torch.Generator().manual_seed(0)
    pair = Pair(torch.randn(3, 8, generator=draw), torch.randn(10, 3, generator=draw))
    x = torch.randn(5, 8, generator=draw)
    whole = (x @ pair.down.T) @ pair.up.T
    rows = [Share(8, 10, (4 * rank, 4 * rank + 4), ((0, 10),)).of(pair) for rank in range(2)]
    summed = sum((x[:, 4 * rank : 4 * rank + 4] @ own.down.T) @ own.up.T for rank, own in enumerate(rows))
    torch.testing.assert_close(summed, whole)
    pieces = [Share(8, 10, (0, 8), ((2 * r, 2 * r + 2), (4 + 3 * r, 7 + 3 * r))).of(pair) for r in range(2)]
    first, second = ((x @ own.down.T) @ own.up.T for own in pieces)
    # not to the bit: the order of summation in a GEMM depends on its width
    torch.testing.assert_close(torch.cat([first[:, :2], second[:, :2], first[:, 2:], second[:, 2:]], dim=1), whole)
    padded = Share(8, 10, (0, 8), ((7, 10),), padding=4).of(pair)
    assert padded.up.shape == (7, 3)
    assert not padded.up[3:].any()
