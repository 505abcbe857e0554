"""Who may use this agent's slots. The agent owns them: what the balancers believe is a guess.

No I/O here. A request holds its slot from the moment its frame arrives, so also while its prompt
is rendered and tokenized, until its last event has been handed to the link.

Several balancers share the slots, and none knows who waits at another. Whose request ends is the
first to know of it, and could fill the slot again and again. So when all slots were taken, and the
link had more of them than another one that wants some, the slot is kept from it for a moment, in
which the other one may take it.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from common.ids import RequestId

OFFER_TIME = 0.02
"""Seconds that a slot is kept for others: balancers are near, and answer at once or have no need."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A free slot, for these links. To be withdrawn after ``OFFER_TIME``."""

    kept_from: Hashable
    to: frozenset[Hashable]


class Admission:
    def __init__(self) -> None:
        self.slots = 0
        """How many requests may run; 0 while no model is loaded."""
        self.draining = False
        self._holders: dict[RequestId, Hashable | None] = {}
        """The link of each request; None: it is lost."""
        self._wanting: set[Hashable] = set()
        """The links that have asked for a slot, and left no offer since."""
        self._offers: list[Offer] = []

    @property
    def processing(self) -> int:
        return len(self._holders)

    @property
    def is_idle(self) -> bool:
        return not self._holders

    def elsewhere(self, link: Hashable) -> int:
        """Slots that this link cannot have: others have them, or are offered them."""
        return self.processing - self._held(link) + self._kept_from(link)

    def admit(self, request_id: RequestId, link: Hashable) -> bool:
        """Take a slot; False if there is none, then the caller must answer ``Busy``."""
        self._wanting.add(link)
        taken = self.processing + self._kept_from(link)
        if self.draining or taken >= self.slots or request_id in self._holders:
            return False
        self._holders[request_id] = link
        for offer in self._offers:
            if link in offer.to:
                self._offers.remove(offer)
                break
        del self._offers[max(0, self.slots - self.processing) :]
        return True

    def release(self, request_id: RequestId) -> Offer | None:
        """Its slot is free, if it had one. The offer that follows, if one does, is to be withdrawn."""
        if request_id not in self._holders:
            return None
        was_full = self.processing + len(self._offers) >= self.slots
        link = self._holders[request_id]
        had = self._held(link)
        del self._holders[request_id]
        if link is None or not was_full or self.processing >= self.slots or self.draining:
            return None
        others = frozenset(
            each for each in self._wanting if each != link and self._held(each) < had
        )
        if not others:
            return None
        offer = Offer(link, others)
        self._offers.append(offer)
        return offer

    def withdraw(self, offer: Offer) -> bool:
        """True if nobody has taken it, so that it is everybody's now."""
        if offer not in self._offers:
            return False
        self._offers.remove(offer)
        self._wanting -= offer.to
        return True

    def forget(self, link: Hashable) -> None:
        """It is lost. What came over it keeps its slots until it is released."""
        self._wanting.discard(link)
        self._offers = [offer for offer in self._offers if offer.kept_from != link]
        for request_id, each in self._holders.items():
            if each == link:
                self._holders[request_id] = None

    def _held(self, link: Hashable | None) -> int:
        return sum(each == link for each in self._holders.values())

    def _kept_from(self, link: Hashable) -> int:
        return sum(offer.kept_from == link for offer in self._offers)
