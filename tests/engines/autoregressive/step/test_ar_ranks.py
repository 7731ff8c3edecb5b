"""Ranks of one replica: each runs the same engine, and what one process would say comes out of rank 0."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model
from ar_words import TEXT, WordAdapter, finish, word_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import Replica, replica

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Fed, FlatBatch, Prompt, Then
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.contract import Payload
from segue.messages.errors import StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, StructuredOutput
from segue.parallel.group import ReplicaBroken
from segue.parallel.ranks import ALONE, Ranks

MODEL = tiny_model("qwen2", seed=3)
LONG = prompts(2, (40, 40), seed=5)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 1.0, "n": 2},
    {"beam_width": 2},
    {"temperature": 0.0, "stop_token_ids": list(range(30))},
)
SMALL = {"num_blocks": 14, "block_size": 4, "max_batch": 4, "max_tokens_per_step": 16}


class Half(TinyAdapter):
    """A rank's part: hidden states are sums over all ranks. Ranks from 1 on have a head of their own, so that they draw
    other tokens."""

    ranks = ALONE

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return Fed(prompt=Prompt(payload["ids"]), then=Then(payload.get("then", "end")))

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, captured = super().forward(embeds, batch)
        if (group := self.ranks.group) is not None:
            hidden = group.all_reduce(hidden / group.size)
        return hidden, captured

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return logits if self.ranks.first else logits.flip(-1)


class HalfWords(Half, WordAdapter):
    pass


def engine(
    ranks: Ranks = ALONE, kind: type[AutoregressiveEngine] = AutoregressiveEngine, **options: Any
) -> AutoregressiveEngine:
    """`options`: of the engine, and of its config."""
    adapter = Half(MODEL)
    adapter.ranks = ranks
    speculation = None
    if options.pop("drafts", False):
        speculation = Speculation(NgramDrafter(1, 3) if ranks.first else None, 3)
    own = {name: options.pop(name) for name in ("ahead", "clock") if name in options}
    config = AutoregressiveConfig(**{**SMALL, "enforce_eager": True, **options})
    return kind(adapter, config, speculation=speculation, ranks=ranks, **own)


@dataclass
class Play:
    """A sequence of calls on an engine, and what came of it."""

    engine: Any
    asked: list[SamplingParams] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drive = Driver(self.engine)

    def __call__(self, call: tuple[str, int, int]) -> None:
        kind, one, other = call
        name = f"r{one % len(self.asked)}" if self.asked else "r"
        match kind:
            case "add":
                params = SamplingParams(max_tokens=3 + other % 4, **SAMPLED[one % len(SAMPLED)])
                self.asked.append(params)
                self.add(f"r{len(self.asked) - 1}", LONG[one % 2][: 1 + other], params)
            case "cancel":
                self.engine.cancel(name)
            case "pause":
                self.engine.pause(name)
            case "resume":
                self.engine.resume(name)
            case _:
                for _ in range(1 + other % 4):
                    self.drive.step()

    def add(self, name: str, ids: list[int], params: SamplingParams, **payload: Any) -> None:
        self.engine.add(stage_request(name, seed=len(name), sampling=params, to_client=TEXT))
        self.engine.feed(name, "input", {"ids": ids, **payload}, final=True)

    def finished(self) -> dict[str, list[int]]:
        """Run to the end; the tokens of all outputs that are finished."""
        for index in range(len(self.asked)):
            self.engine.resume(f"r{index}")
        self.drive.run()
        assert all(output.error is None for result in self.drive.results.values() for output in result.outputs)
        return {name: result.token_ids for name, result in self.drive.results.items() if result.last.finished}


CALLS = st.tuples(
    st.sampled_from(("add", "add", "cancel", "pause", "resume", "step", "step")), st.integers(0, 9), st.integers(0, 23)
)


@settings(max_examples=6, deadline=None)
@given(st.lists(CALLS, max_size=20), st.sampled_from([{}, {"ahead": True}, {"drafts": True}]))
def test_any_calls_give_what_one_process_gives(calls: list[tuple[str, int, int]], options: dict[str, Any]) -> None:
    """With preemptions, forks and beams; and all ranks end with equal states."""
    alone = Play(engine(**options))
    with replica(lambda ranks: engine(ranks, **options)) as made:
        together = Play(made.lead)
        for call in calls:
            alone(call)
            together(call)
        expected = alone.finished()
        assert together.finished() == expected


def test_preempted_on_three_ranks() -> None:
    with replica(lambda ranks: engine(ranks, ahead=True), size=3) as made:
        play = Play(made.lead)
        for index in range(4):
            play.add(f"r{index}", LONG[0][index : 12 + index], SamplingParams(temperature=0.0, max_tokens=12))
        play.drive.run()
        assert made.lead.stats()["preemptions_total"] > 0


def test_blocks_of_a_sequence_that_holds_are_given_back_by_the_clock_of_rank_0() -> None:
    now = [0.0]

    def build(ranks: Ranks) -> AutoregressiveEngine:
        return engine(ranks, hold_seconds=5, clock=(lambda: now[0]) if ranks.first else (lambda: 1e9))

    with replica(build) as made:
        play = Play(made.lead)
        play.add("held", LONG[0][:9], SamplingParams(max_tokens=3), then="turn")
        play.drive.run()
        play.add("other", LONG[1][:3], SamplingParams(max_tokens=2))
        play.drive.step()
        assert made.lead.stats()["held_blocks"] == 3
        now[0] = 6.0
        play.drive.run()
        assert made.lead.stats()["held_blocks"] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_visits_and_what_is_kept_after_them(ahead: bool) -> None:
    """A walk that returns three times; and then a request that goes on from what was kept."""
    sampling = SamplingParams(temperature=0.0, max_tokens=5)

    def told(run: AutoregressiveEngine) -> list[int]:
        play = Play(run)
        request = Request(request_id="r", keep="r")
        run.add(stage_request("r", sampling=sampling, request=request, to_client=TEXT, returns=True))
        for ids in (LONG[0][:9], LONG[0][9:13], LONG[1][:3]):
            run.feed("r", "input", {"ids": ids}, final=True)
            run.go_on("r")
            play.drive.run()
        run.close("r")
        play.drive.run()
        assert play.drive.results["r"].last.finished
        assert run.stats()["held_blocks"] > 0
        read = play.drive.results["r"].token_ids
        said = [*LONG[0][:9], *read[:5], *LONG[0][9:13], *read[5:10], *LONG[1][:3], *read[10:]]
        play.add("more", [*said, *LONG[1][:6]], sampling)
        play.drive.run()
        assert run.stats()["prefix_hit_tokens_total"] == (len(said) - 1) // 4 * 4
        return [*read, *play.drive.results["more"].token_ids]

    expected = told(engine(ahead=ahead))
    with replica(lambda ranks: engine(ranks, ahead=ahead)) as made:
        assert told(made.lead) == expected


@pytest.mark.parametrize("beams", [None, 2])
def test_structured_output(beams: int | None) -> None:
    """Rank 0 alone compiles the grammar; the form, and where it ends, are the same on all."""
    there = threading.Event()

    def build(ranks: Ranks) -> AutoregressiveEngine:
        adapter = HalfWords(word_adapter().model)
        adapter.ranks = ranks
        config = AutoregressiveConfig(num_blocks=60, block_size=8, enforce_eager=True)
        speculation = None
        if beams is None:
            speculation = Speculation(NgramDrafter(1, 3) if ranks.first else None, 3, adaptive=False)
        grammars = Grammars.of(adapter, there.set)
        return AutoregressiveEngine(adapter, config, grammars, speculation, ranks=ranks)

    form = "(yes|no) [0-9]{2,4}!"
    asked = {"good": form, "bad": "[0-9"}
    with replica(build) as made:
        play = Play(made.lead)
        for name, regex in asked.items():
            params = SamplingParams(max_tokens=30, beam_width=beams, structured_outputs=StructuredOutput(regex=regex))
            play.add(name, LONG[0][:5], params)
        finish(play.drive, there, asked)
    good, bad = (play.drive.results[name] for name in asked)
    assert re.fullmatch(form, good.text)
    assert "cannot be compiled" in bad.last.error.message


# --- when ranks differ -----------------------------------------------------------------------------------------------


class Meddled(AutoregressiveEngine):
    """Rank 1's is changed after its fourth step."""

    change: Callable[[AutoregressiveEngine], None]
    steps = 0

    def step(self) -> list[TokenOutput]:
        outputs = super().step()
        self.steps += 1
        if self.steps == 4 and not self._ranks.first:
            self.change(self)
        return outputs


def ended(change: Callable[[AutoregressiveEngine], None]) -> str:
    """Why a rank ended that was changed while a request held its blocks and another one ran."""

    def build(ranks: Ranks) -> AutoregressiveEngine:
        made = engine(ranks, kind=Meddled)
        assert isinstance(made, Meddled)
        made.change = change
        return made

    made = Replica(build)
    try:
        play = Play(made.lead)
        play.add("r", LONG[0][:9], SamplingParams(temperature=0.0, max_tokens=3), then="turn")
        play.drive.run()
        play.add("other", LONG[1][:3], SamplingParams(temperature=0.0, max_tokens=8))
        with suppress(ReplicaBroken):  # rank 0 notices when it needs the other one
            play.drive.run()
    finally:
        made.close()
    [failure] = made.failures
    assert isinstance(failure, ReplicaBroken)
    return str(failure)


def lengthen(engine: AutoregressiveEngine) -> None:
    [scheduled] = engine.resources.scheduler.holding
    scheduled.length += 1


def swap(engine: AutoregressiveEngine) -> None:
    [scheduled] = engine.resources.scheduler.holding
    scheduled.tables[0].blocks.reverse()


@pytest.mark.parametrize(("change", "named"), [(lengthen, "its lengths differ"), (swap, "its blocks differ")])
def test_a_rank_that_differs_ends(change: Callable[[AutoregressiveEngine], None], named: str) -> None:
    assert f"rank 1 has diverged from rank 0: {named}" in ended(change)


def test_an_error_on_one_rank_ends_it() -> None:
    def break_next(engine: AutoregressiveEngine) -> None:
        engine.resources.model.fail_next = True  # type: ignore[attr-defined]

    assert "out of step: RuntimeError: the device is on fire" in ended(break_next)


def test_payloads_that_other_ranks_cannot_get_are_refused() -> None:
    with replica(engine) as made:
        made.lead.add(stage_request("r", sampling=SamplingParams(max_tokens=2)))
        with pytest.raises(StageFailed, match="the payload from upstream holds a object; only tensors"):
            made.lead.feed("r", "input", {"ids": object()}, final=True)
        made.lead.cancel("r")
