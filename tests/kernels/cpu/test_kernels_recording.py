"""A replayed graph gives what the captured calls give on other values, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from segue.kernels.cpu.native import libraries, library
from segue.kernels.cpu.norms import FusedNorm
from segue.kernels.cpu.recorder import record
from segue.kernels.cpu.recording import Recording
from segue.kernels.graphs.cuda_capture import leaves
from segue.kernels.graphs.replay import NotRecordable, TooLarge, anew
from segue.kernels.linear.linear import PackedLinear

pytestmark = pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")


class Pair(NamedTuple):
    """Not a plain tuple."""

    first: torch.Tensor
    second: torch.Tensor


def play(run: Callable[[torch.Tensor], torch.Tensor], *shape: int, trials: int = 3) -> Recording:
    """Record a function of one tensor and compare it with itself on other values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator)
    recording, first = record(library(), lambda: run(x))
    assert torch.equal(first, run(x))
    for _ in range(trials):
        x.normal_(generator=generator)
        expected = run(x).clone()
        with torch.inference_mode():
            recording.result.fill_(torch.nan)
        recording()
        assert torch.equal(recording.result, expected)
    return recording


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_operators_over_any_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 19), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.integers(1, 3))
    spread = [1 if data.draw(st.booleans()) else size for size in shape]
    other = torch.randn(spread)
    what = data.draw(st.sampled_from(["add", "sub", "mul", "div", "neg", "scaled", "halved", "copied", "joined"]))

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x[..., ::step][..., : shape[-1]]
        y = other
        if what not in ("copied", "joined"):
            x, y = x.permute(*order), other.permute(*order)
        match what:
            case "add":
                return x + y
            case "sub":
                return y - x
            case "mul":
                return x * y
            case "div":
                return x / y
            case "neg":
                return -x
            case "scaled":
                return 0.3 * x + 2
            case "halved":
                return x / 2 - 1.5
            case "copied":
                return x.permute(*order).clone(memory_format=torch.contiguous_format)
        return torch.cat([x, -x, x * 2], dim=order[0])

    kernels, of_torch = play(run, *shape[:-1], shape[-1] * step).calls
    assert kernels
    assert not of_torch


def test_a_layer_with_kernels_views_and_what_only_torch_does() -> None:
    torch.manual_seed(0)
    norm, inward = FusedNorm(library(), torch.randn(48), 1e-6), PackedLinear(nn.Linear(48, 144), 8)
    outward = PackedLinear(nn.Linear(48, 48, bias=False), 8)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = inward(norm(x)).split([48, 48, 48], -1)
        q, k = (part.view(1, 5, 3, 16).transpose(1, 2) for part in (q, k))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = (q @ k.mT).softmax(-1) @ v.view(1, 5, 3, 16).transpose(1, 2)
        x = x + outward(mixed.transpose(1, 2).reshape(1, 5, 48))
        return x.clone().mul_(2)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = layer(x)
        return x

    kernels, of_torch = play(run, 1, 5, 48).calls
    assert kernels >= 4 * 12
    assert of_torch


def test_results_of_a_recording_do_not_lie_in_one_another() -> None:
    """Many that live at once, and a long way."""

    def run(x: torch.Tensor) -> torch.Tensor:
        kept = [x * number for number in range(1, 9)]
        total = kept[0] + 1
        for index in (7, 0, 3, 5, 1, 2, 6, 4):
            half = -kept[index]
            total = total * 0.5 + half[..., :10]
            total = torch.cat([total[..., 3:], total[..., :3]], -1)
        return total

    kernels, of_torch = play(lambda x: run(x[..., :10].contiguous()), 3, 30).calls
    assert (kernels > 40, of_torch) == (True, 0)


def test_the_sign_of_zero_is_kept() -> None:
    zero = -torch.zeros(1, 1)
    x = torch.ones(2, 40)
    recording, _ = record(library(), lambda: x / (zero.expand(2, 40) * 1))
    recording()
    assert bool((recording.result == -torch.inf).all())


def test_integers_and_other_types_are_left_to_torch() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        places = (x * 10).long().clamp(0, 4) + 1
        return (x.double() * 2).float() + places + x.half()

    assert play(run, 7, 3).calls[1]


def test_inference_tensors() -> None:
    @torch.inference_mode()
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(-1) + x

    play(run, 4, 9)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape of values": lambda x: x[x > 0],
    "shape of values, none of them": lambda x: x[x > 5],
    "places": lambda x: torch.where(x > 5)[0],
    "random": lambda x: x + torch.rand(3),
    "counts": lambda x: torch.bincount(x.long().abs()).float(),
    "a number": lambda x: x * x.max().item(),
    "a view in place": lambda x: (x + 1).unsqueeze_(0),
    "all places": lambda x: torch.argwhere(x > 5),
    "classes": lambda x: nn.functional.one_hot(x.long()).float(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a comparison": lambda x: x * torch.allclose(x, x + 1),
    "a list": lambda x: x * x.tolist()[0],
    "an array": lambda x: x * float(x.numpy()[0]),
    "what numpy makes of it": lambda x: x * float(np.asarray(x).sum()),
    "a tensor of values": lambda x: x * torch.tensor([x[0], 1.0, 1.0]),
}


SAYS = r"depends on tensor values|draws random numbers|passes values to the host|returns values that are not tensors"


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_the_same_each_time_is_refused(what: str, inference: bool) -> None:
    x = torch.ones(3)
    with torch.inference_mode(inference), pytest.raises(NotRecordable, match=SAYS):
        record(library(), lambda: REFUSED[what](x))
    # and the kernels are as they were
    assert play(lambda x: -x, 2, 3).calls == (1, 0)


def test_what_the_host_looks_at_is_looked_at_anew() -> None:
    def looked_up(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[float(int(row[0])) for row in x.tolist()]])

    kernels, of_torch = play(lambda x: anew(looked_up, x * 40) + x.T[:1] - 1, 5, 3).calls
    assert (kernels, of_torch) == (3, 1)
    assert torch.equal(anew(looked_up, torch.full((2, 1), 3.7)), torch.tensor([[3.0, 3.0]])), "and where nobody records"


def test_memory_that_is_used_again_while_recording() -> None:
    """Intermediate results go as soon as the function lets go of them; constants may come to lie where they were."""

    def run(x: torch.Tensor) -> torch.Tensor:
        total = x * 1
        for number in range(30):
            half = (total * 0.5).cumsum(0)
            del total
            constant = torch.tensor([[float(number)]] * 64).expand(64, 64).clone()
            total = half + constant
            del half, constant
        return total

    recording = play(run, 64, 64)
    assert recording.nbytes <= 4 * 64 * 64 * 4


def test_complex_numbers_and_changes_in_place_are_moved_along() -> None:
    turns = torch.polar(torch.ones(7, 4), torch.randn(7, 4))

    def run(x: torch.Tensor) -> torch.Tensor:
        made = torch.cat([x, x + 1], 1)[:, :8]
        torch.view_as_complex(made.unflatten(-1, (-1, 2))).mul_(turns)
        return made.mul_(2) + torch.view_as_complex(x[:, :8].reshape(7, 4, 2).contiguous()).conj().imag.repeat(1, 2)

    assert play(run, 7, 9).calls[1]


def test_places_that_are_numbers_and_attention_of_which_nothing_is_dropped() -> None:
    places = torch.tensor([2, 0, 1])

    def run(x: torch.Tensor) -> torch.Tensor:
        q = x[places].view(1, 3, 4, 8)
        return nn.functional.scaled_dot_product_attention(q, q * 2, q)

    play(run, 3, 32)
    with pytest.raises(NotRecordable, match="draws"):
        record(
            library(), lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3, dropout_p=0.5)
        )


def test_recordings_share_an_arena_that_is_large_enough() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    x = torch.randn(4, 32)
    first, _ = record(library(), lambda: (x * 2 + 1) * 3, arena[1000:])
    second, _ = record(library(), lambda: ((x - 1) * 2 + 5) * 0.5, arena[1000:])
    for _ in range(2):
        x.normal_()
        second()
        assert torch.equal(second.result, ((x - 1) * 2 + 5) * 0.5)
        first()
        assert torch.equal(first.result, (x * 2 + 1) * 3)
    assert arena[1000:].count_nonzero()
    assert not arena[:1000].count_nonzero()
    with pytest.raises(TooLarge, match=r"take 16384 bytes, of 4096") as caught:
        record(library(), lambda: (x.repeat(16, 1) * 2 + 1) * 3, arena)
    assert torch.equal(caught.value.made, (x.repeat(16, 1) * 2 + 1) * 3), "it was computed all the same"


def test_results_in_any_form_but_an_unknown_one() -> None:
    x = torch.randn(4, 16)

    def run() -> dict[str, Any]:
        doubled = x * 2
        return {"parts": (doubled[:1], [x, doubled[1:].T]), "none": None}

    recording, first = record(library(), run)
    x.normal_()
    recording()
    for made, expected in zip(leaves(recording.result, torch.Tensor), leaves(run(), torch.Tensor), strict=True):
        assert torch.equal(made, expected)
    assert not torch.equal(first["parts"][0], recording.result["parts"][0])
    with pytest.raises(NotRecordable, match="it returns Pair, which may contain anything"):
        record(library(), lambda: Pair(x * 2, x * 3))


def test_what_other_threads_call_meanwhile_is_theirs() -> None:
    layer, theirs = PackedLinear(nn.Linear(16, 16), 8), torch.randn(5, 16)

    def run(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=layer, args=(theirs,))
        other.start()
        other.join()
        return layer(x)

    assert play(run, 3, 16).calls == (1, 0)
