"""The example of a model of one's own as stages: how little it takes, and what is refused at load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from own_model_package import EXAMPLE, Author, installed
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext, AutoregressiveModel, EmbedsInPlace, Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import StageRequest
from segue.messages.errors import ConfigError, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.shared.own_model.decoder import TENSORS, codes_of_turn

MOST_LINES = 120
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    with installed(tmp_path_factory.mktemp("installed")):
        yield Author(tmp_path_factory.mktemp("action-video"))


def context(author: Author, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(author.directory, "trunk", CPU, torch.float32, **more)


def test_the_package_is_short() -> None:
    files = list((EXAMPLE / "segue_action_video").rglob("*.py"))
    assert {"family.py", "stages.py"} <= {file.name for file in files}
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


def test_identities_tell_all_tensors_apart(author: Author) -> None:
    """Every number of every row, which of the tokens it belongs to, and the ids."""
    from segue_action_video.stages import Trunk

    trunk = Trunk(context(author))
    assert isinstance(trunk, EmbedsInPlace)
    mark = author.model.config.action_token_id

    def identity(ids: list[int], rows: torch.Tensor) -> tuple[int | bytes, ...]:
        payload = {"token_ids": torch.tensor(ids), TENSORS: {"actions": rows}}
        prompt = trunk.feed(trunk.begin(_request()), "input", payload, final=True).prompt
        assert isinstance(prompt, Prompt)
        assert prompt.identity is not None
        return tuple(prompt.identity)

    rows = torch.arange(6.0).reshape(2, 3)
    base = identity([5, mark, mark], rows)
    assert base == identity([5, mark, mark], rows.clone())
    others = [identity([5, mark, mark], rows.flip(0)), identity([6, mark, mark], rows)]
    for place in range(6):
        changed = rows.clone()
        changed.view(-1)[place] += 2.0**-20 * max(1.0, place)
        others.append(identity([5, mark, mark], changed))
    assert len({base, *others}) == 9
    assert base[0] == 5
    with pytest.raises(StageFailed, match="gave 2 rows of actions for 1 placeholders"):
        identity([5, mark], rows)


def _request(**more: Any) -> StageRequest:
    before, after = frozenset({"input"}), frozenset({"frames"})
    return StageRequest("one", "trunk", Request(request_id="one"), FALLBACK, 0, before, after, frozenset(), **more)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_frames_come_with_the_last_of_their_codes(turns: list[int], data: st.DataObject) -> None:
    """Whatever was known of the request when its worker died, and whatever turn that was in."""
    ends = list(accumulate(turns))
    known = data.draw(st.integers(0, ends[-1]))
    request = _request(resume=list(range(known)))
    outputs = [TokenOutput("one", token_ids=list(range(known)))] if known else []
    outputs += [TokenOutput("one", token_ids=[at], first_index=at, turn_ended=at + 1 in ends)
                for at in range(known, ends[-1])]  # fmt: skip
    have = 0
    for output in outputs:
        have += len(output.token_ids)
        sent = codes_of_turn(request, output)
        complete = max((end for end in ends if end <= have), default=0)
        if sent is not None:
            assert sent["codes"].tolist() == list(range(sent["start"], have))
        assert (sent is not None) == (have <= known or complete == have)


def test_an_embedding_that_is_not_the_author_s_is_refused(author: Author) -> None:
    """One place off; rows of the tensor left out; an `embed_flat` without its positions."""
    from segue_action_video.stages import Trunk

    class Shifted(Trunk):
        def embed_run(self, ids: torch.Tensor, start: int, tensors: Any) -> torch.Tensor:
            return super().embed_run(ids, start + 1, tensors)

    class Unmoved(Trunk):
        def embed_run(self, ids: torch.Tensor, start: int, tensors: Any) -> torch.Tensor:
            return super().embed_run(ids, start, {"actions": torch.zeros_like(tensors["actions"])})

    class Timeless(Trunk):
        def embed_flat(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return super().embed_flat(ids, places % self.network.config.tokens_per_step)

    for wrong in (Shifted, Unmoved, Timeless):
        with pytest.raises(ConfigError, match="ActionVideoForGeneration cannot be served"):
            wrong(context(author))


def test_what_a_deployment_may_ask_for(author: Author) -> None:
    """int8; without an `embed_flat`; and not `deterministic`. The engine compares batches with single runs at load."""
    from segue_action_video.stages import Trunk

    class Plain(Trunk):
        def embed_flat(self, ids: torch.Tensor, places: torch.Tensor) -> None:  # type: ignore[override]
            return None

    model: AutoregressiveModel = Plain(context(author, quantization="int8"))
    AutoregressiveEngine(model, AutoregressiveConfig(num_blocks=16, block_size=8))
    with pytest.raises(ConfigError, match="by their place in a sequence, which deterministic does not support"):
        AutoregressiveEngine(model, AutoregressiveConfig(num_blocks=16, block_size=8, deterministic=True))
