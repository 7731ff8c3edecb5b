"""Which source of a sampling parameter wins."""

from __future__ import annotations

from segue.messages.sampling import FALLBACK, SamplingParams, merged

ORDER = ("request", "deployment", "family", "checkpoint")


def test_the_first_source_that_sets_a_field_wins() -> None:
    sources = {name: SamplingParams(temperature=0.1 * place) for place, name in enumerate(ORDER, 1)}
    for name in ORDER:
        assert merged(**sources).temperature == sources[name].temperature
        del sources[name]
    assert merged().temperature == FALLBACK.temperature == 1.0


def test_each_field_has_its_own_source() -> None:
    found = merged(
        request=SamplingParams(top_k=3),
        deployment=SamplingParams(top_k=4, top_p=0.5),
        family=SamplingParams(top_p=0.6, max_tokens=7),
        checkpoint=SamplingParams(max_tokens=8, min_p=0.25),
    )
    assert (found.top_k, found.top_p, found.max_tokens, found.min_p) == (3, 0.5, 7, 0.25)
    assert found.seed is None
    assert merged(family=found) == found


def test_zero_and_empty_are_set() -> None:
    found = merged(
        request=SamplingParams(temperature=0.0, stop=[]), deployment=SamplingParams(temperature=0.7, stop=["x"])
    )
    assert (found.temperature, found.stop) == (0.0, [])
