"""Builds the flat batch of a step from its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, EmbedsInPlace, FlatBatch, Prompt
from segue.engines.autoregressive.sample.draw import SampledTokens
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.kernels.attention.paged_step import HybridStep, PagedStep
from segue.kernels.kv.states import StateStep
from segue.kernels.staging import upload_all


def flat_batch(
    model: AutoregressiveModel,
    runs: Mapping[Sequence, ScheduledTokens],
    attention: PagedStep | HybridStep,
    before: SampledTokens | None,
    states: StateStep | None = None,
    *,
    groups: int = 0,
) -> tuple[torch.Tensor, FlatBatch]:
    """(embeddings [tokens, hidden], the batch). Prompts with their own embeddings keep them; all other tokens are
    embedded in one call, or two if generated tokens are conditioned or rows of codes. `before`: what the step in flight
    draws, for sequences that run beyond their known tokens. `groups`: codes per row; 0: tokens are single ids."""
    ids: list[int] = []
    coming: list[tuple[int, int]] = []
    places: list[np.ndarray] = []
    own: list[tuple[int, torch.Tensor]] = []
    plain: list[tuple[int, int]] = []
    generated: list[tuple[int, int]] = []
    conditioning: list[torch.Tensor] = []
    codes: list[list[int]] = []
    codes_coming: list[tuple[int, int]] = []
    prompts: list[tuple[Prompt | None, int, int]] = []
    starts: list[int] = []
    for sequence, run in runs.items():
        begin = len(ids)
        ids += sequence.tokens(run.start, run.stop)
        if len(ids) < begin + run.tokens:
            assert before is not None
            coming.append((len(ids), before.places[sequence]))
            ids.append(0)
        assert len(ids) == begin + run.tokens, "a run covers tokens that were not drawn"
        places.append(sequence.positions(run.start, run.stop))
        at = begin
        for part, start, stop in sequence.input.within(run.start, run.stop):
            prompts.append((part.prompt, start, stop))
            starts.append(part.start + start)
            border = min(max(part.length, start), stop)
            for first, last, rows in _prompt_pieces(part.prompt, start, border):
                piece = at + first - start
                if rows is None:
                    plain.append((piece, piece + last - first))
                else:
                    own.append((piece, rows.to(model.device)))
            if border < stop:
                first, last = border - part.length, stop - part.length
                if model.conditioned:
                    conditioning.append(sequence.conditioning.rows(first, last))
                if groups:
                    codes += part.codes[first:last]
                    if last > len(part.codes):
                        codes_coming.append((len(codes), coming[-1][1]))
                        codes.append([0] * groups)
                (generated if model.conditioned or groups else plain).append((at + border - start, at + stop - start))
            at += stop - start
    arrays = [np.array(ids), np.concatenate(places, axis=1), _pairs(coming)]
    if groups:
        arrays += [np.array(codes, dtype=np.int64).reshape(-1, groups), _pairs(codes_coming)]
    token_ids, positions, moves, *of_rows = upload_all(arrays, model.device)
    if coming:
        assert before is not None
        token_ids.index_copy_(0, moves[0], before.tokens.index_select(0, moves[1]))
    if isinstance(model, EmbedsInPlace):
        batch = FlatBatch(token_ids, None, positions, attention, prompts, states, places=starts)
        return model.embed_batch(batch), batch
    pieces = list(own)
    if plain:
        pieces += _embed(model, token_ids, plain, None)
    if generated:
        rows = torch.cat(conditioning) if conditioning else None
        if groups:
            pieces += _embed_rows(model, of_rows[0], of_rows[1], before, generated, rows)
        else:
            pieces += _embed(model, token_ids, generated, rows)
    pieces.sort(key=lambda piece: piece[0])
    embeds = pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces])
    return embeds, FlatBatch(token_ids, embeds if own else None, positions, attention, prompts, states, places=starts)


def _prompt_pieces(prompt: Prompt, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """Split tokens [start, stop) of a prompt into pieces with their embeddings; None if the ids are to be embedded."""
    if prompt.embeds is None:
        if start < stop:
            yield start, stop, None
        return
    for first, last in prompt.looked_up:
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if start < first:
            yield start, first, prompt.embeds[start:first]
        yield first, last, None
        start = last
    if start < stop:
        yield start, stop, prompt.embeds[start:stop]


def _embed(
    model: AutoregressiveModel,
    token_ids: torch.Tensor,
    ranges: list[tuple[int, int]],
    rows: torch.Tensor | None,
) -> list[tuple[int, torch.Tensor]]:
    """Embed the tokens of several ranges in one call: the pieces, each with its start."""
    sizes = [end - begin for begin, end in ranges]
    if sum(sizes) == len(token_ids):
        return [(0, model.embed(token_ids, rows))]
    wanted = torch.cat([token_ids[begin:end] for begin, end in ranges])
    embedded = model.embed(wanted, rows).split(sizes)
    return [(begin, piece) for (begin, _), piece in zip(ranges, embedded, strict=True)]


def _embed_rows(
    model: AutoregressiveModel,
    codes: torch.Tensor,
    moves: torch.Tensor,
    before: SampledTokens | None,
    ranges: list[tuple[int, int]],
    rows: torch.Tensor | None,
) -> list[tuple[int, torch.Tensor]]:
    """Embed rows of codes [n, groups], the tokens of these ranges in order: the pieces, each with its start. `moves`
    [2, m]: indices of rows that are not known on the host, and where `before` has them."""
    if moves.shape[1]:
        assert before is not None
        assert before.codes is not None
        codes.index_copy_(0, moves[0], before.codes.index_select(0, moves[1]))
    embedded = model.embed(codes, rows).split([end - begin for begin, end in ranges])
    return [(begin, piece) for (begin, _), piece in zip(ranges, embedded, strict=True)]


def _pairs(pairs: list[tuple[int, int]]) -> np.ndarray:
    """[2, n] int64"""
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T
