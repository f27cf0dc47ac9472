"""How ranks are laid out: the axes of a run, and which ranks share data, parameters or layers.

What is done along an axis is in the backend (sharding), ``sequence_parallel`` and
``tensor_parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.config.schema import ParallelConfig
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of this rank.

    ``sharding`` is what parameters are sharded over, with the axis of whole copies in front when
    there is one. ``data`` holds the ranks that see other rows and have the same part of each layer
    and of each sequence; ``sequence`` those that differ in the part of the sequence only, in its
    order. ``tensor`` and ``sequence`` are None with one such rank.
    """

    sharding: DeviceMesh
    tensor: DeviceMesh | None
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup
    data_rank: int
    data_size: int
    model_rank: int
    model_size: int


_built: dict[tuple[str, ParallelConfig], Mesh] = {}
_built_over: dist.ProcessGroup | None = None
"""The default group that the layouts in ``_built`` are of."""


def build_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Lay out all ranks of the default group; every rank must call.

    Engines with one layout share its groups. Each has sockets and threads that only end with the
    default group: tensors of a later engine may be sent through those of an earlier one, since
    DTensor keeps what it worked out for meshes that are equal.

    Raises:
        ConfigError: the axes do not divide the number of ranks.
    """
    global _built_over
    if _built_over is not dist.group.WORLD:
        forget_meshes()
        _built_over = dist.group.WORLD
    axes = ParallelConfig(
        replicate=config.replicate, tensor=config.tensor, sequence=config.sequence
    )
    key = (device_type, axes)
    if key not in _built:
        _built[key] = _build(axes, device_type)
    return _built[key]


def forget_meshes() -> None:
    """Hold on to no group; due before the default group is taken down."""
    global _built_over
    _built_over = None
    _built.clear()


def _build(config: ParallelConfig, device_type: str) -> Mesh:
    """From the outermost axis: replicate, shard, sequence, tensor; the ranks that talk most are
    neighbours. Ranks of one sequence have other tokens, so parameters are sharded over them too.
    """
    world = dist.get_world_size()
    model_size = config.tensor * config.sequence
    shards, rest = divmod(world, model_size * config.replicate)
    if rest or not shards:
        raise ConfigError(
            f"train.parallel: tensor={config.tensor} x sequence={config.sequence} x "
            f"replicate={config.replicate} does not divide the {world} ranks that were started"
        )
    weights = init_device_mesh(
        device_type,
        (config.replicate, shards * config.sequence, config.tensor),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )
    tokens = init_device_mesh(
        device_type,
        (world // model_size, config.sequence, config.tensor),
        mesh_dim_names=("data", "sequence", "tensor"),
    )
    model_rank = dist.get_rank() % model_size
    return Mesh(
        sharding=weights["replicate", "shard"] if config.replicate > 1 else weights["shard"],
        tensor=weights["tensor"] if config.tensor > 1 else None,
        sequence=tokens.get_group("sequence") if config.sequence > 1 else None,
        data=tokens.get_group("data"),
        data_rank=tokens.get_local_rank("data"),
        data_size=world // model_size,
        model_rank=model_rank,
        model_size=model_size,
    )
