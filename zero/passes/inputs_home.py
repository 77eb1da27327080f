"""Where the saved inputs of blocks wait that are computed again: with the graph, in host memory, or in a file."""

from contextlib import ExitStack

from lamina.tiers import Arena, PlacementError, Tier
from lamina.tiers.nvme.unnamed import UnnamedFile
from lamina.zero.homes.residence import Residence

from .saved_inputs import InputsAsTheyAre, InputsInFile, InputsInHost, Room, SavedInputs, arena_within


def home_of_inputs(residence: Residence, closing: ExitStack) -> SavedInputs:
    """As ``options.recompute`` wishes. Raises PlacementError where the host tier has no room for them."""
    options = residence.options
    inputs: SavedInputs = InputsAsTheyAre()
    if options.recompute in (Tier.HOST, Tier.NVME):
        room = Room(_room(residence, closing), options.accelerator)
        if options.recompute is Tier.HOST:
            inputs = InputsInHost(room, options.accelerator)
        else:
            inputs = InputsInFile(room, _file(residence), options.accelerator)
    closing.callback(inputs.close)
    return inputs


def _room(residence: Residence, closing: ExitStack) -> Arena | None:
    """The part of the host tier for saved inputs: what was set aside, else what is left; None without a budget."""
    wanted = residence.options.wishes.saved_input_bytes
    if wanted:
        arena = arena_within(residence.host, wanted)
        closing.callback(arena.close)
        return arena
    if residence.options.budgets.host_bytes is None:
        return None
    if residence.placement.scratch_bytes:
        raise PlacementError(
            "tiers.host_bytes leaves nothing that saved inputs could use (gradients go to a scratch file): set memory aside "
            "for them with tiers.activation_bytes, two inputs of a block at least"
        )
    return residence.host


def _file(residence: Residence) -> UnnamedFile:
    """On the first path; its quota is what the state leaves of it."""
    options = residence.options
    path = options.nvme[0]
    taken = -(-residence.placement.nvme_bytes // len(options.nvme))
    limit = None if path.bytes is None else max(0, path.bytes - taken)
    return UnnamedFile(path.path, residence.open_io(), limit=limit)
