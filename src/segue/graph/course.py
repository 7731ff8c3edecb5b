"""Which stages a request visits and how often, decided from how its earlier visits ended.

A walk says which stages a request may visit; the course says which of them it does visit, and how often. A visit begins
once all edges into it are decided and one of them is taken. An edge without a condition on its source's output is taken
as soon as the source is visited; one with such a condition is decided when the source's visit ends. Once the head, the
stage that loops return to, has ended a visit, the edges that return to it are decided alike: one that is taken begins
the head's next visit, and after it all stages behind the head are visited again, each after its own earlier visit.

Optional reading: a request without loops visits each stage of its walk once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from segue.graph.parts import Outcome, number_of, stage_of, visit_name
from segue.graph.walk import Walk
from segue.messages.errors import StageFailed
from segue.messages.request import Request


class Course:
    """The visits of one request, by name (`visit_name`)."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.begun: dict[str, tuple[str, ...]] = {}
        """Visits that have begun → the visits whose output they get."""
        self._over: set[str] = set()
        self._skipped: set[str] = set()
        """Visits to which no edge was taken."""
        self._cut: set[str] = set()
        """Visits that would only lead to a return which the request may take no more."""
        self._verdicts: dict[tuple[str, str], bool] = {}
        """(visit, stage that follows) → whether the conditional edge was taken."""
        self._returned: Counter[str] = Counter()
        """Stage from which an edge returns → how often it was taken."""
        self.head = next((head for stage in walk.values() for head in stage.returns), None)
        """The stage that loops return to, if any."""
        self.last = 0
        """Number of the head's latest visit."""
        self.closed = self.head is None
        """The head is not visited again."""
        self.stopped_by: str | None = None
        """The edge whose bound ended a loop that would have gone on, as `source -> target`."""
        self.again = frozenset() if self.head is None else self._behind(self.head)
        """The stages that are visited again after each return: the head and all behind it."""
        self.returning = frozenset(one for one in self.again if any(walk[here].returns for here in self._behind(one)))
        """Those of them that lead back to the head."""
        self._chosen = self._returns_by_choice()

    @property
    def over(self) -> bool:
        """Whether no further visit begins."""
        open_ = (visit for number in range(self.last + 1) for visit in self._visits(number) if self._undecided(visit))
        return self.closed and next(open_, None) is None

    def targets(self, visit: str) -> list[str]:
        """Return the visits to which edges from this one may lead, those that return last."""
        stage, number = stage_of(visit), number_of(visit)
        forward = [
            visit_name(target, number if target in self.again else 0) for target in self._walk[stage].downstreams
        ]
        return sorted(forward) + [visit_name(head, number + 1) for head in self._walk[stage].returns]

    def decided(self, source: str, target: str) -> bool:
        """Whether it is known if the output of one visit goes to another."""
        if number_of(target) > number_of(source) and stage_of(target) == self.head:
            return target in self.begun or self.closed
        return not self._undecided(target)

    def end(self, visit: str, outcome: Outcome, request: Request) -> None:
        """Record that a visit has ended, and decide the edges with conditions on its output; once, whatever a later
        attempt of it reports. Raises `StageFailed` if a condition does not answer."""
        if visit in self._over:
            return
        stage = stage_of(visit)
        for target, condition in self._walk[stage].on.items():
            where = f"the condition {getattr(condition, '__name__', condition)!r} of edge {stage!r} -> {target!r}"
            try:
                verdict = condition(request, outcome)
            except Exception as error:  # a family's or a user's code may raise anything: this request fails
                raise StageFailed(f"{where} raised {type(error).__name__}: {error}", stage=stage) from error
            if not isinstance(verdict, bool):
                raise StageFailed(f"{where} gave {verdict!r}; it must give True or False", stage=stage)
            self._verdicts[visit, target] = verdict
        self._over.add(visit)

    def forgo(self, visit: str) -> None:
        """Record that a visit has ended without being made: nothing of it goes on."""
        self._verdicts |= {(visit, target): False for target in self._walk[stage_of(visit)].on}
        self._over.add(visit)

    @property
    def spent(self) -> bool:
        """Whether the head is not visited again, whatever the outcomes of its latest visit and of those behind it."""
        return self.closed or not any(self._may_return(stage) for stage in self._sources)

    def finish(self) -> None:
        """Record that the head ended for good, whatever comes back to it."""
        self.closed = True

    def advance(self) -> list[str]:
        """Begin all visits that can begin now, and return them; each after those whose output it gets."""
        new: list[str] = []
        while True:
            number = 0
            while number <= self.last:
                new += [visit for visit in self._visits(number) if self._undecided(visit) and self._begin(visit)]
                number += 1
            if not self._return():
                return new
            new.append(visit_name(self.head or "", self.last))

    def _visits(self, number: int) -> Iterator[str]:
        """The visits with this number, in topological order, but later ones of the head."""
        for stage in self._walk:
            if number == 0 or (stage in self.again and stage != self.head):
                yield visit_name(stage, number)

    def _undecided(self, visit: str) -> bool:
        return visit not in self.begun and visit not in self._skipped and visit not in self._cut

    def _begin(self, visit: str) -> bool:
        """Begin a visit if it can begin now, or record that it never will."""
        stage, number = stage_of(visit), number_of(visit)
        if number and not self._past(visit_name(stage, number - 1)):
            return False
        sources = [visit_name(up, number if up in self.again else 0) for up in self._walk[stage].upstreams]
        taken = [self._taken(source, stage) for source in sources]
        if None in taken:
            return False
        ups = tuple(source for source, yes in zip(sources, taken, strict=True) if yes)
        if sources and not ups:
            self._skipped.add(visit)
        elif stage in self.again and not self._useful(stage):
            self._cut.add(visit)
        else:
            self.begun[visit] = tuple(sorted(up for up in ups if up in self.begun))
            return True
        return False

    def _past(self, visit: str) -> bool:
        """Whether a visit is over, or will not be made."""
        return visit in self._over if visit in self.begun else not self._undecided(visit)

    def _taken(self, source: str, target: str) -> bool | None:
        """Whether the edge from a visit to a stage is taken; None: not known yet."""
        if source in self._skipped:
            return False
        if source in self._cut:
            return True
        if source not in self.begun:
            return None
        if target not in self._walk[stage_of(source)].on:
            return True
        return self._verdicts.get((source, target))

    def _return(self) -> bool:
        """Begin the head's next visit if an edge back to it is taken."""
        if self.closed:
            return False
        assert self.head is not None
        current = visit_name(self.head, self.last)
        if current in self._skipped:
            self.closed = True
        if current not in self._over:
            return False
        taken = {stage: self._taken(visit_name(stage, self.last), self.head) for stage in self._sources}
        if None in taken.values():
            return False
        coming = [stage for stage in self._sources if taken[stage]]
        free = [stage for stage in coming if self._may_return(stage)]
        if not free:
            self.closed = True
            if coming and self._chosen:
                self.stopped_by = f"{coming[0]} -> {self.head}"
            return False
        self._returned.update(free)
        self.begun[visit_name(self.head, self.last + 1)] = tuple(visit_name(stage, self.last) for stage in free)
        self.last += 1
        return True

    @property
    def _sources(self) -> list[str]:
        """The stages from which an edge returns."""
        return [stage for stage, here in self._walk.items() if self.head in here.returns]

    def _may_return(self, stage: str) -> bool:
        return self._returned[stage] < self._walk[stage].returns[self.head or ""]

    def _useful(self, stage: str) -> bool:
        """Whether a stage leads to the client, or to a return that the request may still take."""
        for behind in self._behind(stage):
            here = self._walk[behind]
            if here.to_client or here.encoded or (here.returns and self._may_return(behind)):
                return True
        return False

    def _behind(self, stage: str) -> frozenset[str]:
        """A stage, and all that its output may reach without a return."""
        found, frontier = {stage}, [stage]
        while frontier:
            new = self._walk[frontier.pop()].downstreams - found
            found |= new
            frontier += new
        return frozenset(found)

    def _returns_by_choice(self) -> bool:
        """Whether an output decides if the request returns, so that a bound cuts off what would have gone on."""
        return any((self.returning | {self.head}) & self._walk[stage].on.keys() for stage in self.again)
