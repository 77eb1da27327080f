"""The placement in print: what lies where, with its bytes, and why; which link binds, and what more of anything would give."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lamina.tiers import Choice, Explanation, Tier, explain
from lamina.tiers.placement.needs import SAVED_INPUTS
from lamina.tiers.placement.shares import met_shares, said_shares
from lamina.zero import ZeroRuntime

from .config import EngineConfig


class TrainingPlan:
    """The placement of a runtime as it is now. ``str()`` gives words, ``as_dict()`` plain data for JSON."""

    def __init__(self, settings: EngineConfig, runtime: ZeroRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        self.changes: Sequence[str] = ()
        """What was found and done while training, oldest first."""
        self._explained: tuple[Choice, Explanation] | None = None

    @property
    def placement(self) -> dict[str, Any]:
        """Each tier's bytes, budget and items; the shares of the planes; each segment's homes."""
        tiers = {
            str(tier): {"bytes": sum(items.values()), "budget": budget, "items": items}
            for tier, items, budget, _ in self._tiers()
        }
        homes: dict[str, dict[str, Any]] = {
            s.name: {"param": str(s.param_tier), "state": str(s.state_tier)} for s in self._runtime.segments
        }
        for s in self._runtime.segments:
            if s.kept:  # elements at the front of this rank's shard
                homes[s.name] |= {"kept": s.kept, "kept_on": str(s.kept_on)}
        return {"tiers": tiers, "shares": self.shares, "homes": homes}

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """Of the parameters, and of the optimizer state, the part of this rank's elements on each tier."""
        met = met_shares(self._runtime.residence.sizes, self._runtime.placement.homes)
        return {what: {str(tier): share for tier, share in shares.items()} for what, shares in met.items()}

    @property
    def stripes(self) -> dict[str, float]:
        """Each path's share of the state on NVMe; empty where there are not several paths."""
        store, paths = self._runtime.store, self._runtime.options.nvme
        shares = store.shares if store is not None and len(paths) > 1 else ()
        return {path.path: share for path, share in zip(paths, shares, strict=False)}

    @property
    def explanation(self) -> Explanation | None:
        """Why it is so, by the simulated step; None where everything is in memory and no link is used.

        Made when it is asked for: it simulates the step under changed budgets and links.
        """
        choice = self._runtime.decision.choice
        if choice is None:
            return None
        if self._explained is None or self._explained[0] is not choice:
            self._explained = (choice, explain(choice))
        return self._explained[1]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        decision = self._runtime.decision
        return self.placement | {
            "links": {"source": decision.links.source, "rates": decision.links.model.as_dict()},
            "stripes": self.stripes,
            "changes": list(self.changes),
            "explanation": None if self.explanation is None else self.explanation.as_dict(),
        }

    def to_json(self) -> str:
        """``as_dict()`` as text."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        return "\n".join([*self._what_lies_where(), *self._why()])

    def _tiers(self) -> Iterator[tuple[Tier, dict[str, int], int | None, str]]:
        """Each tier with its items, its budget, and the kind of its pages."""
        runtime, budgets = self._runtime, self._settings.tiers
        placement = runtime.placement
        device, host = (
            f", {arena.page_kind} pages" if arena.nbytes else "" for arena in (runtime.device, runtime.host)
        )
        yield Tier.DEVICE, dict(placement.device_items), budgets.device_bytes, device
        yield Tier.HOST, dict(placement.host_items), budgets.host_bytes, host
        yield Tier.NVME, dict(placement.nvme_items), None, ""

    def _what_lies_where(self) -> Iterator[str]:
        runtime = self._runtime
        for tier, items, budget, pages in self._tiers():
            limit = f" of {budget:,}" if budget is not None else ""
            yield f"{tier}: {sum(items.values()):,}{limit} bytes{pages}"
            yield from (f"    {size:>16,}  {name}" for name, size in items.items())
        yield from (f"{what}: {said_shares(shares)}" for what, shares in self.shares.items() if shares)
        streamed = sum(not segment.in_place for segment in runtime.segments)
        yield f"{streamed} of {len(runtime.segments)} segments are fetched for use, the others are at home in memory"
        placement = runtime.placement
        yield (
            f"updates go through {placement.staging_count} buffers of {placement.sub_group_numel:,} elements"
            if placement.staging_count
            else "updates run in place in memory"
        )
        if self.stripes:
            yield f"stripes: {', '.join(f'{share:.1%} on {path}' for path, share in self.stripes.items())}"
        if runtime.io is not None:
            yield f"I/O backend: {runtime.io.backend}"
        if runtime.residence.own_state.unknown:
            yield f"outside the budgets: what the optimizer keeps for itself ({runtime.residence.own_state.unknown})"
        early = "under" if runtime.early_segments else "after"
        yield f"updates start {early} the backward pass"
        if self._settings.activations != "keep":
            where = self._settings.activations
            yield f"{len(runtime.recomputed)} blocks are computed again in the backward pass, their inputs wait on {where}"
        if runtime.options.inputs_share_host:
            yield self._room_for_inputs()

    def _room_for_inputs(self) -> str:
        """What the inputs find that no memory was set aside for by the user."""
        inputs, placement, options = self._runtime.saved_inputs, self._runtime.placement, self._runtime.options
        wanted, missed = inputs.wanted_bytes, inputs.without_room_bytes
        if not wanted:
            other = "is refused" if options.accelerator is not None or not options.nvme else "goes to nvme"
            return (
                "nothing is set aside for them (tiers.activation_bytes is not given) before a step has shown what they take: "
                f"they use what is left of tiers.host_bytes, and what finds no room there {other}"
            )
        left = (options.budgets.host_bytes or 0) - placement.host_bytes + placement.host_items.get(SAVED_INPUTS, 0)
        leaves = "nothing, since gradients use the rest" if placement.scratch_bytes else f"{left:,}"
        told = f"they take up to {wanted:,} bytes of host memory, as the steps so far have shown; the placement leaves {leaves}"
        return f"{told}; up to {missed:,} bytes found no room there and went straight to nvme" if missed else told

    def _why(self) -> Iterator[str]:
        decision, explanation = self._runtime.decision, self.explanation
        if explanation is None:
            yield from self._runtime.placement.reasons
            return
        yield decision.links.source
        if not any(decision.choice.question.times.forward_s):  # type: ignore[union-attr]
            yield "forward and backward were not measured yet: what follows counts them as nothing"
        yield str(explanation)
        yield from self.changes
