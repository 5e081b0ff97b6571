"""Which paged layers a forward waits for, and which have attended: how a cache knows that a forward is complete."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ReferenceType, ref

from transformers import PreTrainedModel

from questkv.errors import CacheMismatchError
from questkv.hf.watch import attention_layers, is_running, running_model, watch

# What forwards have taught: layers that lack tokens, and those that a forward waits for.
Knowledge = tuple[frozenset[int], frozenset[int]]


class Attendance:
    """The layers of a cache's forwards.

    A forward is complete when every layer that the model has and runs has attended. A model may lack layers of its
    config (pruned models) or leave some out as it runs; the second shows when a watched forward returns without them.

    Args:
        paged_layers: The layers that the config promises.

    Attributes:
        attended: Those that have attended in the last forward; all of them once it is complete.
        behind: Those that lack tokens of an earlier forward, which left them out. They can't attend any more.
        is_watched: Whether the model's own forward tells when it has returned.
    """

    def __init__(self, paged_layers: Iterable[int]) -> None:
        self.paged_layers = frozenset(paged_layers)
        self.attended: set[int] = set()
        self.behind: set[int] = set()
        self.is_watched = False
        self._expected = set(self.paged_layers)
        self._model: ReferenceType[PreTrainedModel] | None = None
        # What had attended in a forward that nobody watched and that was taken for an interrupted one.
        self._taken_back: set[int] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the forward waits for no layer."""
        return self.attended >= self._expected

    @property
    def knowledge(self) -> Knowledge:
        """What complete forwards have taught, to be put back after an exception."""
        return frozenset(self.behind), frozenset(self._expected)

    @knowledge.setter
    def knowledge(self, knowledge: Knowledge) -> None:
        self.behind, self._expected = set(knowledge[0]), set(knowledge[1])

    @property
    def is_inside(self) -> bool:
        """Whether the caller runs inside the watched forward: in a hook, or behind the layers."""
        model = None if self._model is None else self._model()
        return self.is_watched and model is not None and is_running(model)

    def know(self, model: PreTrainedModel) -> None:
        """Stop waiting for layers that the model hasn't got."""
        if self._model is None or self._model() is not model:
            self._model = ref(model)
            has = attention_layers(model)
            if not has.isdisjoint(self.paged_layers):
                self._expected &= has

    def find_model(self) -> None:
        """Know the model whose forward is running, and have it watched from its next forward on."""
        if not self.is_watched and (self._model is None or self._model() is None):
            model = running_model()
            if model is not None:
                self.know(model)
                watch(model)

    def complete(self) -> set[int]:
        """The forward is complete; gives the layers that it has left out."""
        left_out = self._expected - self.attended
        self._expected -= left_out
        self.attended |= self.paged_layers
        self._taken_back = None
        return left_out

    def take_back(self) -> None:
        """The forward is taken for an interrupted one.

        Raises:
            CacheMismatchError: Nobody watched it, and the one before ended at the same layers: they may be all that the
                model runs.
        """
        if self.is_watched or not self.attended:
            return
        before, self._taken_back = self._taken_back, set(self.attended)
        if before == self._taken_back:
            self._taken_back = None
            raise self._error()

    def check_not_taken_back(self) -> None:
        """Raise CacheMismatchError if a forward with the layers of this one, which has returned, was taken back."""
        if self._taken_back == self.attended:
            raise self._error()

    def fork(self) -> Attendance:
        """The same knowledge for a second cache; no forward is under way."""
        other = Attendance(self.paged_layers)
        other.behind, other._expected, other._model = set(self.behind), set(self._expected), self._model
        return other

    def _error(self) -> CacheMismatchError:
        missing = ", ".join(map(str, sorted(self._expected - self.attended)))
        return CacheMismatchError(
            f"[QuestCache] forward: expected the layers {missing} of the model's config to attend, forwards end "
            "without them: the model leaves them out, and an earlier forward was undone as if it had been "
            "interrupted; start again with a new cache inside questkv.attach(model)"
        )
