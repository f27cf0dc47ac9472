"""Keys and values of running sequences: working rows, shared prefix blocks, attention over both.

Which request sits in which row, and who is admitted, is the generation engine's business.

Running sequences lie in *rows*, each contiguous, because on a CPU gathering scattered blocks before
every attention call costs several times the attention itself. Rows of similar length lie together,
and attention is one call for them. *Blocks* of ``BLOCK`` tokens carry
what is shared: they are filed under the SHA-256 of all tokens up to their end, counted by
reference, and copied into a row once, when a sequence starts.
"""

from tandem.models.cache.attend import CacheContext, ChunkGroup, RowCopy
from tandem.models.cache.blocks import BLOCK, BlockPool, block_keys, num_blocks
from tandem.models.cache.prefix import PrefixStore
from tandem.models.cache.rows import KVCache

__all__ = [
    "BLOCK",
    "BlockPool",
    "CacheContext",
    "ChunkGroup",
    "KVCache",
    "PrefixStore",
    "RowCopy",
    "block_keys",
    "num_blocks",
]
