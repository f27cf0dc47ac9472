"""How ranks are laid out: the axes of a run, and which ranks share data, parameters or layers.

What is done along an axis is in the backend (sharding) and ``tensor_parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.config.schema import ParallelConfig
from tandem.errors import ConfigError

AXES = ("replicate", "shard", "sequence", "tensor")
"""Outermost first, so that the ranks that talk most (``tensor``) are neighbours."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of this rank.

    ``sharding`` is what parameters are sharded over, with the axis of whole copies in front when
    there is one; ``tensor`` is None with one tensor-parallel rank. ``data`` holds the ranks that
    see other rows and have the same part of each layer.
    """

    sharding: DeviceMesh
    tensor: DeviceMesh | None
    data: dist.ProcessGroup
    data_rank: int
    data_size: int
    model_rank: int
    model_size: int


def build_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Lay out all ranks of the default group; every rank must call.

    Raises:
        ConfigError: the axes do not divide the number of ranks.
    """
    world = dist.get_world_size()
    model_size = config.tensor * config.sequence
    shards, rest = divmod(world, model_size * config.replicate)
    if rest or not shards:
        raise ConfigError(
            f"train.parallel: tensor={config.tensor} x sequence={config.sequence} x "
            f"replicate={config.replicate} does not divide the {world} ranks that were started"
        )
    axes = init_device_mesh(
        device_type,
        (config.replicate, shards, config.sequence, config.tensor),
        mesh_dim_names=AXES,
    )
    rows = init_device_mesh(
        device_type, (world // model_size, model_size), mesh_dim_names=("data", "model")
    )
    data_rank, model_rank = rows.get_local_rank("data"), rows.get_local_rank("model")
    return Mesh(
        sharding=axes["replicate", "shard"] if config.replicate > 1 else axes["shard"],
        tensor=axes["tensor"] if config.tensor > 1 else None,
        data=rows.get_group("data"),
        data_rank=data_rank,
        data_size=world // model_size,
        model_rank=model_rank,
        model_size=model_size,
    )
