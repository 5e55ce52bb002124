"""How many replicas the fleet has: grows at once with demand, shrinks late, and far where demand fell far.

PolyServe section 4.3 for a fleet whose size is not fixed. Pure: ``step`` gets what is known and returns what to do; a
shell (``controller.serve_scaler``) carries it out through Serve. What other autoscalers get wrong is a rule here:

- it grows only for demand that lasted ``upscale_delay_s`` (none: at once), but from nothing at once;
- constant load does not change the size: it shrinks only to what was enough at any time of ``downscale_delay_s`` with
  ``downscale_margin`` to spare, and after a shrink that had to be taken back it waits twice as long;
- a cold start triggers no second one: what is starting counts, and queues count again only when it had time to help;
- a queue that comes and goes within a second triggers none either: queues count by their mean;
- missing reports never shrink it, and it never goes below its minimum;
- a replica that Serve cannot start is cancelled after ``start_timeout_s`` where demand can do without it, and much
  sooner where no node has room for it: what it waits for may be held by a fleet that cannot shrink while it waits;
- a size set by hand stays for ``manual_hold_s``, within the bounds; one that a deploy reset is not taken for that;
- a number that a deploy changed is where it begins anew, and under the bounds of that deploy alone.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from controller.disaggregation.phases import Phase
from controller.scaling.demand import share_budget
from controller.scaling.draining import Drained
from controller.scaling.history import Change, History
from controller.scaling.missing import Missing
from controller.scaling.needs import Needs, Queued, Queues, apart_size, needs_of, spare_replicas
from controller.scaling.role import Kind, ReplicaView, StaticRoles
from controller.scaling.roles import DynamicRoles
from controller.scaling.signals import Actions, ScalingOptions, Serve, Signals

MOST_PATIENCE = 16.0  # times ``downscale_delay_s``
OPTIONS_S = 180.0  # a deploy's own options come with its ingresses; its number is told before, and stays until then
MOST_DRAINED = 0.25  # of the fleet, that a single decision drains at most


@dataclass
class Autoscaler:
    """``roles`` are where replicas are drained and taken back, and where shares are kept."""

    options: ScalingOptions
    roles: DynamicRoles | StaticRoles
    history: History
    undoes_resets: bool = True  # what a deploy resets; False: the leader of several controllers does it
    target: int | None = None  # what Serve was last asked for
    wanted: dict[str, float] = field(default_factory=dict)  # per tier by demand and bounds; parts of shared ones
    phase_needs: dict[Phase, float] = field(default_factory=dict)  # in a disaggregated fleet, as fractions
    held_until_s: float = -math.inf
    waits_until_s: float = -math.inf  # for the options of a deploy that changed the number
    missing: Missing = field(default_factory=Missing)
    _grown_s: float = -math.inf
    _shrunk_s: float = -math.inf
    _regretted_s: float = -math.inf  # when a shrink had to be taken back last
    _short_s: float = math.inf  # since when the fleet has been too small
    _complete_s: float = -math.inf  # since when no replica is missing
    _deployed: float | None = None  # the deploy that the target is of
    _needs: deque[tuple[float, int]] = field(default_factory=deque)  # what it may shrink to at each time, lately
    _since_s: float | None = None
    _patience: float = 1.0  # times ``downscale_delay_s``, grown by shrinks that were taken back
    _drained: Drained = field(default_factory=Drained)
    _queues: Queues = field(default_factory=Queues)
    _decode_queues: Queues = field(default_factory=Queues)

    # -- one step ---------------------------------------------------------------------------------------------------

    def step(self, signals: Signals, now_s: float) -> Actions:
        """Decide; call it every second or so."""
        if signals.serve is None:
            return Actions()
        self.missing.note(signals.serve, now_s)
        self._since_s = now_s if self._since_s is None else self._since_s
        if (restored := self._adopt(signals.serve, now_s)) is not None:
            return self._ask(min(restored, self._high), now_s, "a deploy had reset it")
        assert self.target is not None
        if now_s < self.waits_until_s:
            self._take_back(self.target - self._staying, signals, now_s, "a deploy changed the number")
            self._since_s = None
            return Actions()
        self.waits_until_s = -math.inf
        bounded = min(max(self.target, self._low), self._high)
        if self.target < bounded:
            return self._ask(bounded, now_s, f"minimum of {bounded}")
        alive = self._alive(signals)
        self._complete_s = min(self._complete_s, now_s) if len(alive) >= self.target else math.inf
        need = self._need(signals, now_s)
        staying = self._staying
        held = now_s < self.held_until_s
        self._short_s = min(self._short_s, now_s) if need > staying else math.inf
        if held:
            staying += self._take_back(bounded - staying, signals, now_s, "the size was set by hand")
        elif need > staying:
            return self._grow(need, staying, signals, now_s)
        lowest = bounded if held else min(bounded, max(total for _, total in self._needs))
        cancelled, why = self.missing.in_vain(staying - max(lowest, self._low), self.options.start_timeout_s, now_s)
        if cancelled:
            return self._ask(self.target - cancelled, now_s, f"{cancelled} {why}")
        if lowest < staying and self._may_shrink(alive, bounded, now_s):
            self._shrink(
                signals, staying - lowest, now_s, "above the maximum" if bounded < staying else "demand takes less"
            )
        return self._remove(signals, now_s)

    def on_removed(self, name: str, now_s: float) -> None:
        """The drained replica is gone, and Serve was asked for one less; one that came to be meanwhile asks Serve."""
        self._drained.forget(name)
        if self.target is not None:
            self._set(self.target - 1, now_s, f"{name} was drained and removed")

    @property
    def _low(self) -> int:
        """Fewest replicas: the fleet's minimum and every tier's; one of each phase where these are apart."""
        low = sum(tier.low for tier in self.roles.table.tiers)
        return max(self.options.min_replicas, max(low, 1) + 1 if self.options.phases else low)

    @property
    def _high(self) -> int:
        """Most replicas; a minimum counts more."""
        return max(self._low, self.options.max_replicas)

    @property
    def _staying(self) -> int:
        """Replicas asked for that are not to go."""
        assert self.target is not None
        return self.target - len(self.roles.names(Kind.DRAINING))

    def _adopt(self, serve: Serve, now_s: float) -> int | None:
        """What Serve is asked for; where that is not what we asked for, somebody set it by hand.

        A deploy sets it to what the configuration says, whatever else it changes: unless that number changed too, the
        size before is to be asked for again, and is returned.
        """
        is_deploy, self._deployed = self._deployed not in (None, serve.deployed), serve.deployed
        before, replicas = self.target, serve.replicas
        if before is not None and replicas != before:
            if is_deploy and self.undoes_resets and replicas == self.options.configured:
                self._set(replicas, now_s, "deployed anew")
                return before
            if is_deploy:
                self._set(replicas, now_s, "deployed with another number")
                self.begin_anew(now_s + OPTIONS_S)
            else:
                self.held_until_s = now_s + self.options.manual_hold_s
                self._set(replicas, now_s, f"set by hand, stays for {self.options.manual_hold_s:g} s")
        self.target = replicas
        return None

    def begin_anew(self, waits_until_s: float = -math.inf) -> None:
        """A deploy has changed the number: as after a start nothing holds it, and it shrinks late."""
        self.target, self.held_until_s, self.waits_until_s, self._since_s = None, -math.inf, waits_until_s, None
        self._needs.clear()

    def options_came(self) -> None:
        """Those of a deploy that changes the number; where that was seen before, what was set by hand since stays."""
        if self.waits_until_s == -math.inf:
            self.begin_anew()
        self.waits_until_s = -math.inf

    def _alive(self, signals: Signals) -> list[ReplicaView]:
        return [view for view in signals.views if view.is_reporting]

    # -- how many ---------------------------------------------------------------------------------------------------

    def _need(self, signals: Signals, now_s: float) -> int:
        """Replicas that the demand takes now, within all bounds. While none of the group reports, no fewer than there
        are: none is lost, and whoever asks gets a first one."""
        assert self.target is not None
        need = enough = 0
        if signals.hardware is not None:
            queues = self._queued(signals, now_s)
            is_apart, unattainable = bool(self.options.phases), self.options.unattainable
            needs_at = partial(needs_of, self.roles, signals, queues, is_apart=is_apart, unattainable=unattainable)
            needs = needs_at(self.options.target_utilization)
            lasting = needs_at(self.options.target_utilization * (1.0 - self.options.downscale_margin))
            need, enough = self._total(needs, signals), self._total(lasting, signals)
            self._share(needs)
        if not any(self.options.is_own(view.name) for view in self._alive(signals)):
            others = 0 if signals.hardware is not None else len(self._alive(signals))
            first = min(others + int(bool(signals.loads)), self._high)
            need, enough = max(need, self._staying, first), max(enough, self.target, first)
        self._needs.append((now_s, enough))
        while self._needs[0][0] < now_s - self._downscale_delay_s:
            self._needs.popleft()
        return need

    def _queued(self, signals: Signals, now_s: float) -> Queued:
        """Mean prompt tokens in queue, by tier, and of those that wait to decode. Queues count once everything asked
        for has had time to help."""
        self._queues.note(signals.waiting_tokens, self.options.upscale_cooldown_s, now_s)
        self._decode_queues.note(signals.decode_waiting_tokens, self.options.upscale_cooldown_s, now_s)
        if now_s - self._complete_s < self.options.upscale_cooldown_s:
            return {}, {}
        return self._queues.mean(), self._decode_queues.mean()

    def _total(self, needs: Needs, signals: Signals) -> int:
        size = math.ceil(sum(needs.tiers) - 1e-9)
        if self.options.phases:
            size = apart_size(needs, self._alive(signals), self.options.group, self.options.phases)
        return min(max(size + self.options.warm_spares, self._low), self._high)

    def _share(self, needs: Needs) -> None:
        """Where tiers with replicas of their own want more than there may be, each gets a share."""
        tiers, needed, most = self.roles.table.tiers, needs.tiers, self._high
        if self.options.phases:
            self.phase_needs, most = needs.by_phase, most - needs.prefill_share(most)
        names = [tier.name for tier in tiers]
        told = [int(count) if count == int(count) else round(count, 2) for count in needed]
        self.wanted, self.roles.shares = dict(zip(names, told, strict=True)), {}
        if isinstance(self.roles, DynamicRoles) and sum(needed) > most:
            shares = share_budget([tier.low for tier in tiers], [int(count) for count in needed], most)
            self.roles.shares = dict(zip(names, shares, strict=True))

    @property
    def _downscale_delay_s(self) -> float:
        return self.options.downscale_delay_s * self._patience

    # -- more -------------------------------------------------------------------------------------------------------

    def _grow(self, need: int, staying: int, signals: Signals, now_s: float) -> Actions:
        """Draining replicas are taken back first: they are warm. The rest Serve starts."""
        if now_s - self._shrunk_s < 2.0 * self._downscale_delay_s:
            self._patience, self._shrunk_s = min(MOST_PATIENCE, 2.0 * self._patience), -math.inf
            self._regretted_s = now_s
        staying += self._take_back(need - staying, signals, now_s, "demand came back")
        waited = now_s - self._short_s >= self.options.upscale_delay_s or not self.target  # an empty fleet helps nobody
        if need > staying and waited and now_s - self._grown_s >= self.options.upscale_cooldown_s:
            assert self.target is not None
            self._grown_s = now_s
            return self._ask(self.target + need - staying, now_s, f"demand: {self._told()}")
        return Actions()

    def _take_back(self, most: int, signals: Signals, now_s: float, reason: str) -> int:
        """Draining replicas serve again, ``most`` at most, of the phase with the least to spare first; how many do."""
        spare, phases = self._spare(signals), {view.name: view.phase for view in signals.views}
        names = sorted(self.roles.names(Kind.DRAINING), key=lambda name: spare.get(phases.get(name), 0.0))
        back = [name for name in names[: max(0, most)] if self.roles.restore(name, signals.views, now_s, reason)]
        for name in back:
            self._drained.forget(name)
        return len(back)

    def _spare(self, signals: Signals) -> dict[Phase | None, float]:
        """Replicas of each phase beyond its need; -inf where it has only one."""
        return spare_replicas([v for v in self._alive(signals) if self.roles.is_open(v.name)], self.phase_needs)

    def _ask(self, replicas: int, now_s: float, reason: str) -> Actions:
        self._set(replicas, now_s, reason)
        self._complete_s = math.inf
        return Actions(replicas=replicas)

    def _set(self, replicas: int, now_s: float, reason: str) -> None:
        self.history.note(Change(now_s, "fleet", str(self.target), str(replicas), reason))
        self.target = replicas

    def _told(self) -> str:
        told = [f"{tier} {count}" for tier, count in self.wanted.items() if count]
        told += [f"{phase} {need:.2g}" for phase, need in self.phase_needs.items() if need]
        return ", ".join(told) or "none"

    # -- less -------------------------------------------------------------------------------------------------------

    def _may_shrink(self, alive: Sequence[ReplicaView], bounded: int, now_s: float) -> bool:
        """Not while a replica is starting or silent, nor sooner than its pauses allow."""
        assert self.target is not None
        assert self._since_s is not None
        is_whole = len(alive) >= self.target
        seen_long_enough = now_s - self._since_s >= self._downscale_delay_s or self.target > bounded
        paused = now_s - max(self._shrunk_s, self._grown_s) < self.options.downscale_cooldown_s
        return is_whole and seen_long_enough and not paused

    def _shrink(self, signals: Signals, surplus: int, now_s: float, reason: str) -> None:
        """Drain half of the surplus, one at least and ``MOST_DRAINED`` of the fleet at most: of the phase with the most
        to spare, from the pool, those with the least to do first; then the least loaded above a minimum."""
        assert self.target is not None
        for _ in range(max(1, min(surplus // 2, int(MOST_DRAINED * self.target)))):
            if (name := self._dispensable(signals)) is None:
                return
            if now_s - max(self._grown_s, self._shrunk_s, self._regretted_s) > 4.0 * self._downscale_delay_s:
                self._patience = max(1.0, 0.5 * self._patience)
            self._shrunk_s = now_s
            self._drained.begin(name, now_s)
            self.roles.drain(name, now_s, f"{reason}: {self._told()}")

    def _dispensable(self, signals: Signals) -> str | None:
        """Whom the fleet can do without most easily."""
        kinds, spare = {Kind.POOL: 0, Kind.PENDING: 1}, self._spare(signals)

        def rank(view: ReplicaView) -> tuple[float, int, float, int, str]:
            kind = kinds.get(self.roles.role(view.name).kind, len(kinds))
            return -spare.get(view.phase, -math.inf), kind, view.load, view.best_effort, view.name

        own = [view for view in signals.views if self.options.is_own(view.name) and self.roles.is_open(view.name)]
        may_leave = [v for v in own if self.roles.may_leave(v.name) and spare.get(v.phase, 0.0) > -math.inf]
        return min(may_leave, key=rank).name if may_leave else None

    def _remove(self, signals: Signals, now_s: float) -> Actions:
        """End drained replicas that may go."""
        views = {view.name: view for view in signals.views if self.options.is_own(view.name)}
        names, timeout_s = self.roles.names(Kind.DRAINING), self.options.drain_timeout_s
        return Actions(remove=self._drained.ended(names, views, timeout_s, now_s))
