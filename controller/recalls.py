"""What ingresses are told unasked: requests of theirs that were sent, have not begun, and must ask anew."""

import asyncio
from collections import Counter
from collections.abc import Iterable

LISTENING_S = 5.0  # that an ingress's question stays open while there is nothing to say
DEAF_S = 2.0  # without an open question for so long, an ingress hears nothing more: it is gone, or blocked


class RecallBox:
    """Open questions of ingresses, answered as soon as there is something for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}  # attempt ids by ingress
        self._heard_s: dict[str, float] = {}  # when its last question ended
        self._open = Counter[str]()  # questions of each ingress: a new one may come before an earlier one has ended
        self._told: dict[str, asyncio.Event] = {}

    def is_listening(self, ingress: str, now_s: float) -> bool:
        """Whether the ingress will hear of a recall soon."""
        return ingress in self._open or now_s - self._heard_s.get(ingress, -float("inf")) <= DEAF_S

    def tell(self, recalls: Iterable[tuple[str, str]]) -> None:
        """Put ingresses and attempt ids in; an ingress that has never asked is not told."""
        for ingress, attempt_id in recalls:
            if ingress in self._told:
                self._waiting.setdefault(ingress, []).append(attempt_id)
                self._told[ingress].set()

    async def listen(self, ingress: str) -> list[str]:
        """Attempt ids for this ingress: at once where there are some, else within ``LISTENING_S``."""
        told = self._told.setdefault(ingress, asyncio.Event())
        self._open[ingress] += 1
        try:
            if ingress not in self._waiting:
                told.clear()
                async with asyncio.timeout(LISTENING_S):
                    await told.wait()
        except TimeoutError:
            pass
        finally:
            self._open[ingress] -= 1
            self._open += Counter()  # without those that have none
            self._heard_s[ingress] = asyncio.get_running_loop().time()
        return self._waiting.pop(ingress, [])

    def forget(self, now_s: float) -> None:
        """Drop what was kept for ingresses that are gone."""
        for ingress in [name for name in self._heard_s if not self.is_listening(name, now_s)]:
            for kept in (self._heard_s, self._told, self._waiting):
                kept.pop(ingress, None)
