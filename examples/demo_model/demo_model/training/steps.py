"""What all parts of the training share: steps by number or by time, how they are resumed, and their log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from demo_model.training.muon import Muon

WARM_UP = 100
"""Steps in which the learning rate rises."""
SLOW = 0.05
"""Learning rate of a part's `slow` modules, relative to that of the others."""
FURTHER = 0.7
"""Learning rate, relative to a part's own, of one whose weights are those of a checkpoint that is trained further."""
LOGGED_EVERY = 20
"""Steps."""
LOG = "log.jsonl"


@dataclass(frozen=True)
class Part:
    """One part of the training.

    `modules` of the model are trained, and `own`, which only the training needs; everything else stays. `batch` makes
    the data of a step from its number alone, in processes of its own on a CPU, so that a resumed training sees what an
    uninterrupted one does: a tensor, or a dataclass of them, which is moved to the device. `loss` gives the loss and
    values to log, on the device.
    """

    name: str
    modules: Sequence[nn.Module]
    batch: Callable[[int], Any] | None = None
    loss: Callable[[Any, int], tuple[Tensor, dict[str, Tensor]]] | None = None
    own: nn.Module | None = None
    once: Callable[[], dict[str, float]] | None = None
    """Instead of batches and their loss: learns all on a CPU, and gives values to log."""
    rate: float = 1e-3
    slow: Sequence[nn.Module] = ()
    """Those of the modules that change little: what another part has taught, and what has many inputs alike, as a
    patch's pixels, so that changes of its weights add up."""
    matrices: Sequence[nn.Parameter] = ()
    """Those of the weights that `Muon` trains, at `matrix_rate`."""
    stacks: Sequence[nn.Parameter] = ()
    """Likewise, of [experts, rows, columns]."""
    matrix_rate: float = 0.002

    def groups(self) -> list[dict[str, Any]]:
        """The trained parameters for the optimizer, without `matrices` and `stacks`; `share`: of the learning rate."""
        slow = [parameter for module in self.slow for parameter in module.parameters()]
        known = set(map(id, [*slow, *self.matrices, *self.stacks]))
        others = [one for one in self.trained().parameters() if one.requires_grad and id(one) not in known]
        return [{"params": others, "share": 1.0}, {"params": slow, "share": SLOW}]

    def trained(self) -> nn.ModuleList:
        return nn.ModuleList([*self.modules, *([self.own] if self.own else [])])


@dataclass(frozen=True)
class Limits:
    """How long a part is trained: for `steps`, over all calls, or for `minutes` of this one, if that is earlier. Steps
    before a checkpoint that is trained further do not count."""

    steps: float = math.inf
    minutes: float = math.inf

    def share(self, step: int, seconds: float) -> float:
        """How much of the training is over; 1 where it ends."""
        return max(step / self.steps, seconds / 60 / self.minutes if self.minutes > 0 else 1.0)


class _Steps(Dataset[Any]):
    """Batches by number."""

    def __init__(self, batch: Callable[[int], Any], first: int, last: int) -> None:
        self._batch, self._first, self._last = batch, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        return self._batch(self._first + index)


def train(
    part: Part,
    limits: Limits,
    directory: Path,
    *,
    device: torch.device,
    workers: int = 1,
    saved_every: float = 60.0,
    half: bool = False,
) -> None:
    """Train to the limits; go on from what an earlier call, complete or killed, left. `half`: products in bfloat16.

    Without what an earlier call left, as in a copy of a checkpoint that is trained further, steps are numbered on from
    the log.

    Writes `<name>.pt`, what is needed to go on, after the first step, every `saved_every` seconds and at the end, and
    appends to the log.
    """
    left = directory / f"{part.name}.pt"
    assert part.batch is not None
    assert part.loss is not None
    trained = part.trained().to(device)
    groups = part.groups()
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimizers = [torch.optim.AdamW(groups, lr=part.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]
    if part.matrices:
        share = part.matrix_rate / part.rate
        kinds: list[dict[str, Any]] = [
            {"params": [*part.matrices], "share": share},
            {"params": [*part.stacks], "share": share, "stacked": True},
        ]
        optimizers.append(Muon(kinds, part.matrix_rate, half=half))
    first = step = logged(directory / LOG, part.name)
    if left.exists():
        found = torch.load(left, weights_only=True, map_location=device)
        trained.load_state_dict(found["weights"])
        for optimizer, state in zip(optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first, step = found["first"], found["step"]
    most = FURTHER if first else 1.0
    begun, saved = time.monotonic(), -math.inf  # the first step is saved before the log knows of it
    share, recent = limits.share(step - first, 0.0), _Recent()
    if share >= 1:
        return
    for batch in _batches(part, step, first + limits.steps, workers):
        torch.manual_seed(step)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = most * part.rate * group["share"] * _rate(step - first, share)
        with torch.autocast(device.type, torch.bfloat16, enabled=half), _attention(device):
            loss, values = part.loss(moved(batch, device), step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        recent.add({"loss": loss, **values})
        now = time.monotonic()
        share = limits.share(step - first, now - begun)
        if step % LOGGED_EVERY == 0 or share >= 1:
            row = {"part": part.name, "step": step, "seconds": round(now - begun, 1), **recent.means()}
            _write(directory / LOG, row)
        if now - saved > saved_every or share >= 1:
            states = [optimizer.state_dict() for optimizer in optimizers]
            _save(left, {"weights": trained.state_dict(), "optimizers": states, "first": first, "step": step})
            saved = now
        if share >= 1:
            return


def learn(part: Part, directory: Path) -> None:
    """What a part learns at `once`; nothing if it has."""
    assert part.once is not None
    left = directory / f"{part.name}.pt"
    if not left.exists():
        begun = time.monotonic()
        values = part.once()
        _write(directory / LOG, {"part": part.name, "step": 0, "seconds": round(time.monotonic() - begun, 1), **values})
        _save(left, {"weights": part.trained().state_dict()})


def _attention(device: torch.device) -> AbstractContextManager[Any]:
    return PlainAttention() if device.type == "cpu" else nullcontext()


class PlainAttention(TorchFunctionMode):
    """Computes attention as the product of its parts: a CPU takes twice to four times as long for the gradient of
    torch's, and what is compiled of it has gradients that are not finite (2.13, `SDPBackend.MATH`)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _attended if func is functional.scaled_dot_product_attention else func
        return plain(*args, **(kwargs or {}))


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`functional.scaled_dot_product_attention`, without dropout."""
    assert not dropout_p
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value


def logged(log: Path, name: str) -> int:
    """The last step of a part in a log, from which it goes on with other data; 0 if it has none."""
    rows = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return max((row["step"] for row in rows if row["part"] == name), default=0)


def restore(part: Part, directory: Path) -> None:
    """Load what a part has learned, if it has been trained."""
    left = directory / f"{part.name}.pt"
    if left.exists():
        part.trained().load_state_dict(torch.load(left, weights_only=True, map_location="cpu")["weights"])


def moved(value: Any, device: torch.device) -> Any:
    """A batch on the device: tensors, and dataclasses of them; everything else stays."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def _batches(part: Part, step: int, end: float, workers: int) -> Iterable[Any]:
    """Of the steps from `step` to `end`; without `workers` they are made between the steps."""
    data = _Steps(part.batch, step, step + 10**9 if end == math.inf else int(end))
    return DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=3 if workers else None)


def _rate(step: int, share: float) -> float:
    """Of the learning rate: a short rise, then half a cosine down to a fiftieth."""
    return min((step + 1) / WARM_UP, 1.0) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(share, 1.0))) / 2)


def _save(path: Path, state: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    torch.save(state, beside)
    beside.replace(path)


class _Recent:
    """Values of the steps since the last line of the log. They stay on the device, so that no step waits for it."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._rows.setdefault(name, []).append(value.detach())

    def means(self) -> dict[str, float]:
        """The mean of each value; forgets them."""
        found = {name: round(torch.stack(values).mean().item(), 4) for name, values in self._rows.items()}
        self._rows = {}
        return found


def _write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
