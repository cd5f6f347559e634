"""NVFP4 paged KV caches for JAX: pack, append, prefill and decode as jittable functions."""

from nvfp4_pallas.batch import RaggedBatch as RaggedBatch
from nvfp4_pallas.batch import slot_mapping as slot_mapping
from nvfp4_pallas.cache import PagedKVCache as PagedKVCache
from nvfp4_pallas.cache import PagePool as PagePool
from nvfp4_pallas.cache import RecentWindow as RecentWindow
from nvfp4_pallas.cache import copy_pages as copy_pages
from nvfp4_pallas.debug import debug_checks as debug_checks
from nvfp4_pallas.format import NvFp4Array as NvFp4Array
from nvfp4_pallas.layer import LlamaAttention as LlamaAttention
from nvfp4_pallas.layer import attend as attend
from nvfp4_pallas.layer import rope_table as rope_table
from nvfp4_pallas.mesh import MeshOps as MeshOps
from nvfp4_pallas.ops.append import append as append
from nvfp4_pallas.ops.auto import resolve_read_path as resolve_read_path
from nvfp4_pallas.ops.decode import decode as decode
from nvfp4_pallas.ops.merge import merge_states as merge_states
from nvfp4_pallas.ops.pack import pack as pack
from nvfp4_pallas.ops.pack import unpack as unpack
from nvfp4_pallas.ops.prefill import prefill as prefill
from nvfp4_pallas.recent import copy_rings as copy_rings
from nvfp4_pallas.recent import open_rings as open_rings
