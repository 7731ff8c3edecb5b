"""A reply that the prompt gives is computed as if it had been written: same rows, same ids, whatever sampling says."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import NAME, VOCAB, Driver, TinyAdapter, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.messages.errors import TooLong
from segue.messages.sampling import SamplingParams

ASKED, REPLY, OTHER = prompts(3, (19, 30, 25))
END = VOCAB - 1
GIVEN = [token for token in REPLY if token != END] + [END]
WILD = SamplingParams(temperature=2.0, max_tokens=2, suppress_tokens=GIVEN[:3], repetition_penalty=1.7)
"""None of which matters to tokens that are given."""


@pytest.fixture(scope="module")
def adapter() -> TinyAdapter:
    adapter = TinyAdapter(tiny_model(), capture=True)
    adapter.end_token_ids = frozenset({END})
    return adapter


@pytest.fixture(scope="module")
def rows(adapter: TinyAdapter) -> torch.Tensor:
    """The library's: all tokens but the last are computed."""
    adapter.model.set_attn_implementation("eager")
    with torch.inference_mode():
        hidden = adapter.model.model(torch.tensor([[*ASKED, *GIVEN[:-1]]])).last_hidden_state[0]
    adapter.model.set_attn_implementation(NAME)
    return hidden


def driver(adapter: TinyAdapter, **config: int) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"block_size": 4, "num_blocks": 64, **config})))


def add(drive: Driver, name: str, **more: object) -> None:
    request = stage_request(
        name, sampling=WILD, downstreams=frozenset({"talker"}), to_client=frozenset({"text"}), seed=9, **more
    )
    drive.add(request, Prompt(list(ASKED), reply=GIVEN))


@pytest.mark.parametrize("most", [7, 512], ids=["in pieces", "at once"])
@pytest.mark.parametrize("blocks", [24, 64], ids=["a small pool", "a large pool"])
def test_its_rows_are_those_of_the_written_reply(
    adapter: TinyAdapter, rows: torch.Tensor, most: int, blocks: int
) -> None:
    drive = driver(adapter, max_tokens_per_step=most, num_blocks=blocks)
    drive.add(stage_request("other", sampling=SamplingParams(temperature=0.0, max_tokens=40)), OTHER)
    add(drive, "said")
    results = drive.run()
    add(drive, "again", resume=GIVEN[:5])
    for result in (results["said"], drive.run()["again"]):
        assert result.token_ids == GIVEN
        assert result.text == adapter.decode_text(GIVEN[:-1], skip_special_tokens=True)
        assert (result.last.finished, result.last.finish_reason) == (True, "stop")
        torch.testing.assert_close(result.rows(), rows, atol=2e-4, rtol=1e-4)
    assert drive.results["again"].outputs[0].cached_tokens > 0


def test_it_takes_no_step_per_token(adapter: TinyAdapter) -> None:
    drive = driver(adapter)
    adapter.forwards.clear()
    add(drive, "said")
    drive.run()
    assert adapter.forwards == [len(ASKED) + len(GIVEN) - 1]


def test_one_that_does_not_fit_is_refused(adapter: TinyAdapter) -> None:
    drive = driver(adapter)
    reply = [1] * (adapter.max_model_len - len(ASKED) + 1)
    drive.add(stage_request("long"), Prompt(list(ASKED), reply=reply))
    error = drive.run()["long"].last.error
    assert isinstance(error, TooLong)
    assert "together they may have at most 256" in error.message
    drive.add(stage_request("fits"), Prompt(list(ASKED), reply=reply[1:]))
    assert drive.run()["fits"].token_ids == reply[1:]
