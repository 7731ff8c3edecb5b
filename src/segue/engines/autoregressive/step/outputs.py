"""Builds the output of a step for one sequence: its first counts, its new tokens and how they end it, and its captured
rows. Also detects repetitions, as vLLM's `repetition_detection` does."""

from __future__ import annotations

from collections import abc

import numpy as np
import torch

from segue.engines.autoregressive.contract import Then
from segue.engines.autoregressive.output import CapturedRows, TokenOutput
from segue.engines.autoregressive.sample.detokenize import TextOutput
from segue.engines.autoregressive.sample.draw import StepResult
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.kernels.kv.store import KVStore
from segue.kernels.staging import upload
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import RepetitionDetection
from segue.messages.units import TurnEnd, Unit, ids_of, rows_of

REASON = "repetition"
"""`finish_reason` of an output that ends by repetition; vLLM's."""
STOP_REASON = "repetition_detected"
"""Its `stop_reason`; vLLM's."""


def looked_at(asked: RepetitionDetection) -> int:
    """How many of the last tokens repetition detection reads."""
    return asked.max_pattern_size * asked.min_count


def repeats(tokens: abc.Sequence[Unit], asked: RepetitionDetection) -> bool:
    """Whether `tokens` end with `min_count` repeats of a pattern of one of the given sizes."""
    end = len(tokens)
    for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1):
        begin = end - size * asked.min_count
        if begin < 0:
            return False
        # each token equals the one a pattern length earlier
        if all(tokens[place] == tokens[place - size] for place in range(end - 1, begin + size - 1, -1)):
            return True
    return False


def announce(sequence: Sequence, run: ScheduledTokens, output: TokenOutput) -> bool:
    """Write what is reported once per input: counts of prompt tokens, and tokens that an earlier attempt had drawn.
    False: there is nothing to report."""
    output.first_index = sequence.emitted
    tokens = sequence.input.input_tokens
    new = bool(sequence.to_emit) or tokens > sequence.counted
    if tokens > sequence.counted and sequence.index == 0:
        output.prompt_tokens = tokens
        output.modality_tokens = sequence.input.modality_tokens
        if not sequence.counted:
            output.cached_tokens = min(run.start, tokens)
    sequence.counted = tokens
    for units, end in sequence.to_emit:
        output.token_ids += ids_of(units)
        output.codes += rows_of(units)
        output.text += _text_again(sequence, ids_of(units), end)
    sequence.to_emit = []
    return new


def _text_again(sequence: Sequence, ids: list[int], end: TurnEnd | None) -> str:
    """Detokenize tokens that an earlier attempt had drawn. `end`: how their turn ended; None: the turn goes on."""
    if sequence.text is None:
        return ""
    out, found = "", False
    pushed = sequence.text if end is None else TextOutput(sequence.model, sequence.request)
    for count, token in enumerate(ids, 1):
        ends = end is not None and count == len(ids) and token in sequence.end_ids
        text, found = pushed.push(token, ends=ends, may_stop=count >= sequence.min_tokens)
        out += text
    if end is not None and not found:
        out += pushed.flush(may_stop=len(ids) >= sequence.min_tokens)
    return out


def accept(sequence: Sequence, result: StepResult, block_size: int, output: TokenOutput) -> None:
    """Append the new tokens up to one that ends the output; set their text and whether the output ends. `block_size`:
    as for `Sequence.append`."""
    scores = result.scores or [one.chosen.logprob for one in result.logprobs]
    for count, token in enumerate(result.tokens, 1):
        row = result.codes[count - 1 : count]
        sequence.append(token, block_size, row)
        output.token_ids = [*output.token_ids, token]
        output.codes = [*output.codes, *row]
        output.logprobs = result.logprobs[:count]
        sequence.logprob += sum(scores[count - 1 : count])
        may_stop = sequence.generated >= sequence.min_tokens
        if sequence.grammar is not None and not sequence.grammar.accept(token):
            output.error = StageFailed("a token that the grammar forbids was drawn", stage=sequence.request.stage)
            return
        ends = token in sequence.end_ids or (sequence.grammar is not None and sequence.grammar.over)
        ends = ends or (may_stop and bool(row) and sequence.ends_by(row[0]))
        found = False
        if sequence.text is not None:
            text, found = sequence.text.push(token, ends=ends, may_stop=may_stop)
            output.text += text
        whole = ends or found or (sequence.grammar is not None and sequence.grammar.exhausted)
        if whole or sequence.generated >= sequence.most:
            _end(sequence, output, token if ends else None, found=found, whole=whole, scored=bool(scores))
            return
        if may_stop and _goes_round(sequence):
            _end(sequence, output, None, found=False, whole=False, scored=bool(scores))
            output.finish_reason, output.stop_reason = REASON, STOP_REASON
            return


def _goes_round(sequence: Sequence) -> bool:
    """Whether the newest token completes a repetition that ends the output."""
    asked = sequence.request.sampling.repetition_detection
    if asked is None:
        return False
    begin = max(sequence.prompt_length, len(sequence.ids) - looked_at(asked))
    if sequence.codes:
        return repeats(sequence.codes[begin - sequence.prompt_length :], asked)
    return repeats(sequence.ids[begin:], asked)


def _end(sequence: Sequence, output: TokenOutput, token: int | None, *, found: bool, whole: bool, scored: bool) -> None:
    """Set why the output ended and flush the text held back. `token`: the token that ended it; `found`: a stop string
    ended it; `whole`: it was not cut off."""
    output.finished = sequence.then is not Then.TURN
    output.turn_ended = not output.finished
    output.finish_reason = "stop" if whole else "length"
    if token is not None and token in (sequence.request.sampling.stop_token_ids or ()):
        output.stop_reason = token
    elif found and sequence.text is not None:
        output.stop_reason = sequence.text.found
    if scored and not sequence.request.resume:  # scores of an earlier attempt are unknown
        output.cumulative_logprob = sequence.logprob
    if sequence.text is not None and not found:
        output.text += sequence.text.flush(may_stop=sequence.generated >= sequence.min_tokens)


def give_rows(
    sequence: Sequence, run: ScheduledTokens, computed: torch.Tensor, store: KVStore, output: TokenOutput
) -> bool:
    """Emit captured rows not emitted yet: of this step (`computed` [accepted tokens of the run, width]), and of cached
    blocks. False: there are none."""
    start, stop = sequence.rows_given, sequence.scheduled.computed
    if start >= stop:
        return False
    if start >= run.start:
        data = computed[start - run.start :]
    else:
        rows, size = store.rows, store.block_size
        assert rows is not None
        where = torch.arange(start, stop, device=rows.device)
        blocks = upload(np.array(sequence.scheduled.tables[0].blocks), rows.device)  # group 0 keeps all its blocks
        data = rows[blocks[where // size] * size + where % size]
    output.captured = CapturedRows(start, data)
    if start == 0:
        output.prompt = sequence.input.first.prompt
    sequence.rows_given = stop
    return True


def nothing_left(sequence: Sequence) -> InvalidRequest:
    """The error of a sequence whose tokens are all forbidden."""
    return InvalidRequest(
        f"after {sequence.generated} tokens, the sampling constraints of stage {sequence.request.stage!r} forbid every "
        "token; see its allowed_token_ids, suppress_tokens, bad_words, min_tokens and structured_outputs",
        field=f"sampling.{sequence.request.stage}",
    )
