"""Where the saved inputs of blocks wait that are computed again: with the graph, in host memory, or in a file."""

from contextlib import ExitStack

from lamina.tiers import PlacementError, Tier
from lamina.tiers.nvme.unnamed import UnnamedFile
from lamina.zero.homes.residence import Residence

from .inputs_room import Room, arena_within
from .saved_inputs import InputsAsTheyAre, InputsInFile, InputsInHost, SavedInputs


def home_of_inputs(residence: Residence, closing: ExitStack) -> SavedInputs:
    """As ``options.recompute`` wishes. Raises PlacementError where the host tier has no room for them."""
    options = residence.options
    inputs: SavedInputs = InputsAsTheyAre()
    if options.recompute in (Tier.HOST, Tier.NVME):
        room = _room(residence, closing)
        overflows = options.inputs_share_host and options.accelerator is None
        if options.recompute is Tier.HOST:
            open_file = (lambda: _file(residence)) if overflows and options.nvme else None
            inputs = InputsInHost(room, options.accelerator, open_file)
        else:
            inputs = InputsInFile(room, _file(residence), options.accelerator, needs_room=not overflows)
    closing.callback(inputs.close)
    return inputs


def _room(residence: Residence, closing: ExitStack) -> Room:
    """The part of the host tier for saved inputs: what was set aside, else what is left."""
    options = residence.options
    if options.wishes.saved_input_bytes:
        arena = arena_within(residence.host, options.wishes.saved_input_bytes)
        closing.callback(arena.close)
        return Room([arena], options.accelerator)
    if not options.inputs_share_host:
        return Room([], options.accelerator, grows=True)
    if not residence.placement.scratch_bytes:
        return Room([residence.host], options.accelerator)
    if options.accelerator is not None:
        raise PlacementError(
            "tiers.host_bytes leaves nothing that saved inputs could use (gradients go to a scratch file): set memory aside "
            "for them with tiers.activation_bytes, two inputs of a block at least"
        )
    return Room([], None)  # what is left there is for gradients


def _file(residence: Residence) -> UnnamedFile:
    """On the first path; its quota is what the state leaves of it."""
    options = residence.options
    path = options.nvme[0]
    taken = -(-residence.placement.nvme_bytes // len(options.nvme))
    limit = None if path.bytes is None else max(0, path.bytes - taken)
    return UnnamedFile(path.path, residence.open_io(), limit=limit)
