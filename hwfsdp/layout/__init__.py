"""The part of a tensor that a rank holds: extents by placement, the table of a model, weights drawn row by row.

    operator_arguments  sizes and meshes among the arguments of operators
    extents             the part that a rank holds under the placements of a DTensor, even strided and uneven parts
    shard_on_meta       a process that pretends to be a rank; the modules that become groups
    explain             a model's parameters as a table, in a run or on paper
    init_shards         the same weights for any number of ranks

You can import the names of `operator_arguments` and `extents` from here, such as `hwfsdp.layout.local_extent_of`.
"""

from hwfsdp.layout.operator_arguments import (
    normalize_to_torch_size as normalize_to_torch_size,
    try_find_mesh_from_args as try_find_mesh_from_args,
)
from hwfsdp.layout.extents import (
    SHARDS as SHARDS,
    LocalExtent as LocalExtent,
    compute_global_tensor_info as compute_global_tensor_info,
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    compute_local_stride as compute_local_stride,
    explicit_order_placements as explicit_order_placements,
    extents_of as extents_of,
    front_of as front_of,
    largest_shape as largest_shape,
    local_extent_of as local_extent_of,
    nested_extent as nested_extent,
    orders_of_cuts as orders_of_cuts,
    shard_of as shard_of,
    shard_strided as shard_strided,
    slices_of as slices_of,
    unshard_strided as unshard_strided,
)
