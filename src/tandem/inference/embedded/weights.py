"""Committing published weights to a core. Waiting for them belongs to ``inference/updates.py``,
transports and manifests to ``tandem.weights``.
"""

from __future__ import annotations

import torch

from tandem.inference.embedded.core import EmbeddedCore
from tandem.types import ParamSpec, WeightVersion
from tandem.weights import Manifest, Published, check_manifest, open_published

CONVERSIONS = frozenset({("float32", "bfloat16")})
"""(published, served) dtypes that may differ; everything else must be equal."""


def commit(core: EmbeddedCore, published: Published) -> None:
    """Verify every tensor, copy them all and serve the new version; call at a token border.

    Raises:
        WeightSyncError: nothing was copied.
    """
    manifest = published.manifest
    check_manifest(manifest, _with_conversions(core.param_specs(), manifest))
    parameters = core.parameters()
    with open_published(published) as tensors, torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    core.set_version(WeightVersion(manifest.incarnation, manifest.version))


def _with_conversions(specs: list[ParamSpec], manifest: Manifest) -> list[ParamSpec]:
    sent = {entry.name: entry.dtype for entry in manifest.tensors}
    return [
        ParamSpec(spec.name, spec.shape, sent[spec.name])
        if (sent.get(spec.name), spec.dtype) in CONVERSIONS
        else spec
        for spec in specs
    ]
