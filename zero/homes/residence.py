"""Where one rank's segments are at home: groups, placement, arenas and store, and the state brought there."""

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from lamina.aio_native import AsyncIO
from lamina.tiers import Arena, Block, GenerationStore, Home, Tier
from lamina.tiers.memory.limits import check_budget, read_memory_limits
from lamina.zero.adam.kernels import Kernels
from lamina.zero.groups.segment import Segment
from lamina.zero.options import ZeroOptions
from lamina.zero.ranks.collectives import Ranks

from .away import is_away
from .choosing import decide
from .fitting import fit_groups
from .initial_state import InitialState
from .move_rules import why_all_stays
from .own_state import OwnState
from .resume import is_to_resume

INITIAL_WRITE_BYTES = 16 << 20  # a buffer for the time of initialisation, where there are no update buffers


class Residence:
    """The homes of one module's state on one rank, and the memory and files that these take.

    ``placement`` and ``decision`` change when state is moved while training. What is opened is given back by ``closing``.
    """

    def __init__(self, module: nn.Module, options: ZeroOptions, ranks: Ranks, closing: ExitStack) -> None:
        self.module = module
        self.options = options
        self.ranks = ranks
        self._closing = closing
        self.own_state = OwnState(options.client)
        self.groups, question, usual = fit_groups(module, options, ranks, self.own_state)
        self.decision = decide(question, usual, options, ranks)
        self.placement = self.decision.placement
        self.sizes = question.segments
        self.segments = [segment for group in self.groups for segment in group.segments]
        for segment in self.segments:
            self.settle(segment, self.placement.homes[segment.name])
        self._check_memory()
        self.device = self._arena(Tier.DEVICE, options.budgets.device_bytes, self.placement.device_bytes)
        self.host = self._arena(Tier.HOST, options.budgets.host_bytes, self.placement.host_bytes)
        if options.accelerator is not None:
            closing.enter_context(options.accelerator.page_locked(self.host))
        self.kernels = Kernels(options.num_threads)
        closing.callback(self.kernels.close)
        self._io: AsyncIO | None = None
        self.store = self._open_store()
        self.staging = self.host_blocks("update buffers", self.placement.staging_count)
        self.resumed = is_to_resume(self.store, self.segments, options, ranks)
        self._bring_home()

    @property
    def io(self) -> AsyncIO | None:
        """This rank's way to its files; None where it has none."""
        return self._io

    def open_io(self) -> AsyncIO:
        """The same, opened when it is needed first."""
        if self._io is None:
            self._io = self.options.open_io()
            self._closing.callback(self._io.close)
        return self._io

    def settle(self, segment: Segment, home: Home) -> None:
        """Note where a segment is at home, and whether compute can use it there."""
        segment.param_tier, segment.state_tier = home.param, home.state
        segment.kept, segment.kept_on, segment.late = home.kept, home.kept_on, home.late
        segment.in_place = segment.persistent or home.param in self.options.wishes.in_place_tiers

    def arena(self, tier: Tier) -> Arena:
        """A tier's memory. Raises KeyError for nvme."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host}[tier]

    def host_blocks(self, item: str, count: int) -> list[Block]:
        """``count`` equal blocks of the host tier for an item of the placement."""
        if count == 0:
            return []
        nbytes = self.placement.host_items[item] // count
        blocks = [self.host.alloc(nbytes, item) for _ in range(count)]
        for block in blocks:
            self._closing.callback(block.free)
        return blocks

    @property
    def fixed(self) -> str | None:
        """Why no home can change while training, as a clause; None when some can."""
        if self.decision.choice is None:
            return "nothing was measured that another placement could be compared by"
        return why_all_stays(self.options, self.placement)

    # -- memory and files ----------------------------------------------------------------------------------------------

    def _check_memory(self) -> None:
        """Refuse budgets (or needs, where there is no budget) beyond what this process can have. Raises BudgetError."""
        budgets, placement = self.options.budgets, self.placement
        wanted = {Tier.HOST: placement.host_bytes if budgets.host_bytes is None else budgets.host_bytes}
        if self.options.accelerator is None:
            wanted[Tier.DEVICE] = placement.device_bytes if budgets.device_bytes is None else budgets.device_bytes
        keys = " + ".join(f"tiers.{tier}_bytes" for tier, nbytes in wanted.items() if nbytes)
        # The module's own parameters move into the tiers: their memory counts as had already.
        held = sum(p.nbytes for p in self.module.parameters() if p.device.type == "cpu")
        total = sum(wanted.values())
        check_budget(keys, total, read_memory_limits(), already_held=min(held, total))

    def _arena(self, tier: Tier, budget: int | None, needed: int) -> Arena:
        own = self.placement.own_bytes if tier is Tier.HOST else 0
        nbytes = (needed if budget is None else budget) - own
        accelerator = self.options.accelerator if tier is Tier.DEVICE else None
        arena = accelerator.arena(nbytes) if accelerator is not None else Arena(tier, nbytes)
        self._closing.callback(arena.close)
        return arena

    def _open_store(self) -> GenerationStore | None:
        stored = [segment.name for segment in self.segments if segment.stored_planes]
        if not stored:
            return None
        options = self.options
        # Whatever may come to live there later is known to the store, and left out of it for now.
        moves = self.fixed is None
        later = [s.name for s in self.segments if moves and s.trainable and not s.stored_planes]
        shards = [
            replace(segment.shard_spec(), planes=segment.planes) if segment.name in later else segment.shard_spec()
            for segment in self.segments
            if segment.name in (*stored, *later)
        ]
        store = GenerationStore.open(
            self.decision.links.paths,
            job=options.job,
            rank=self.ranks.rank,
            shards=shards,
            io=self.open_io(),
            generations=options.generations,
            verify=options.verify,
            discard_torn=options.resume is False or not options.keep_state,
            left_out=later,
            fronts={segment.name: segment.kept for segment in self.segments if segment.kept},
        )
        self._closing.callback(lambda: store.close(remove=not options.keep_state))
        return store

    # -- the first values ----------------------------------------------------------------------------------------------

    def _bring_home(self) -> None:
        """The parameters as the module has them (on a resume: as the store has them), and states of zeros."""
        chunk = self.placement.sub_group_numel
        block = self.staging[0] if self.staging else None
        spare: Arena | None = None
        if block is None and self.store is not None:  # only frozen segments are on NVMe
            spare = Arena(Tier.HOST, min(INITIAL_WRITE_BYTES, chunk * 4))
            block = spare.alloc(spare.nbytes, "initial write")
            chunk = block.nbytes // 4
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not is_away(tensor):
                    self.ranks.broadcast(tensor.data)
        InitialState(
            arenas={Tier.DEVICE: self.device, Tier.HOST: self.host},
            kernels=self.kernels,
            store=self.store,
            staging=block,
            chunk_numel=chunk,
            ranks=self.ranks,
            tell=self.options.tell,
        ).bring_home(self.segments, keep_stored=self.resumed)
        if block is not None and spare is not None:
            block.free()
            spare.close()
        self._convert_buffers()

    def _convert_buffers(self) -> None:
        """The module's buffers go to where compute runs, and to its dtype."""
        if self.options.accelerator is not None:
            for owner in self.module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    owner._buffers[name] = buffer.to(self.options.accelerator.device)
        if self.options.compute_dtype is not None:
            # Buffers that no state dict has (rotary frequencies, say) keep their precision, as where transformers loads them.
            for owner in self.module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    if buffer.is_floating_point() and name not in owner._non_persistent_buffers_set:
                        owner._buffers[name] = buffer.to(self.options.compute_dtype)
