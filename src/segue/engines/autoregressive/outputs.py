"""What a step gives out for one sequence: how it begins, its new tokens and how they end it, its captured rows."""

from __future__ import annotations

import numpy as np
import torch

from segue.engines.autoregressive.jobs import Run
from segue.engines.autoregressive.picks import Pick
from segue.engines.autoregressive.repetition import REASON, STOP_REASON, looked_at, repeats
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.contract import Rows, StageOutput
from segue.kernels.kv_store import KVStore
from segue.kernels.staging import upload
from segue.messages.errors import InvalidRequest, StageFailed


def announce(sequence: Sequence, run: Run, output: StageOutput) -> bool:
    """The first output of a request: counts, and what an earlier attempt had generated. False: it is not the first."""
    output.first_index = sequence.generated
    if sequence.announced:
        return False
    assert sequence.prompt is not None
    sequence.announced = True
    if sequence.index == 0:
        output.prompt_tokens = sequence.prompt_length
        output.cached_tokens = min(run.start, sequence.prompt_length)
        output.modality_tokens = dict(sequence.prompt.modality_tokens)
    output.first_index = 0
    output.token_ids = sequence.request.resume[:-1]
    if sequence.text is not None:
        for count, token in enumerate(output.token_ids, 1):
            text, _ = sequence.text.push(token, ends=False, may_stop=count >= sequence.min_tokens)
            output.text += text
    return True


def accept(sequence: Sequence, picked: Pick, block_size: int, output: StageOutput) -> None:
    """The new tokens, up to one that ends the output: their text, and whether the output ends. `block_size`: as for
    `Sequence.append`."""
    scores = picked.scores or [told.chosen.logprob for told in picked.logprobs]
    for count, token in enumerate(picked.tokens, 1):
        sequence.append(token, block_size)
        output.token_ids = [*output.token_ids, token]
        output.logprobs = picked.logprobs[:count]
        sequence.logprob += sum(scores[count - 1 : count])
        may_stop = sequence.generated >= sequence.min_tokens
        if sequence.grammar is not None and not sequence.grammar.accept(token):
            output.error = StageFailed("a token that the grammar forbids was drawn", stage=sequence.request.stage)
            return
        ends = token in sequence.end_ids or (sequence.grammar is not None and sequence.grammar.over)
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
    return repeats(sequence.ids[begin:], asked)


def _end(sequence: Sequence, output: StageOutput, token: int | None, *, found: bool, whole: bool, scored: bool) -> None:
    """Why the output ended, and what was held back. `token`: that ends it by itself; `found`: a stop string was;
    `whole`: it was not cut off."""
    output.finished = True
    output.finish_reason = "stop" if whole else "length"
    if token is not None and token in (sequence.request.sampling.stop_token_ids or ()):
        output.stop_reason = token
    elif found and sequence.text is not None:
        output.stop_reason = sequence.text.found
    if scored and not sequence.request.resume:  # of what an earlier attempt made, nothing is known
        output.cumulative_logprob = sequence.logprob
    if sequence.text is not None and not found:
        output.text += sequence.text.flush(may_stop=sequence.generated >= sequence.min_tokens)


def give_rows(sequence: Sequence, run: Run, computed: torch.Tensor, store: KVStore, output: StageOutput) -> bool:
    """Captured rows that are not out yet: of this step (`computed` [tokens of the run that hold, width]), and of blocks
    found in the cache. False: there are none."""
    start, stop = sequence.rows_given, sequence.job.computed
    if start >= stop:
        return False
    if start >= run.start:
        data = computed[start - run.start :]
    else:
        rows, size = store.rows, store.block_size
        assert rows is not None
        where = torch.arange(start, stop, device=rows.device)
        blocks = upload(np.array(sequence.job.tables[0].blocks), rows.device)  # group 0 keeps all of them
        data = rows[blocks[where // size] * size + where % size]
    output.captured = Rows(start, data)
    if start == 0:
        output.prompt = sequence.prompt
    sequence.rows_given = stop
    return True


def nothing_left(sequence: Sequence) -> InvalidRequest:
    """The error of a sequence for which every token is forbidden."""
    return InvalidRequest(
        f"after {sequence.generated} tokens, what the sampling of stage {sequence.request.stage!r} forbids leaves none "
        "to choose; see its allowed_token_ids, suppress_tokens, bad_words, min_tokens and structured_outputs",
        field=f"sampling.{sequence.request.stage}",
    )
