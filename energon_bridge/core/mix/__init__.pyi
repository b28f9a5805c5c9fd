"""The names of the package, each once: type checkers read this file, and `lazy_loader` does at run time."""

__all__: list[str]

from .flatten import (
    Mix as Mix,
    MixLeaf as MixLeaf,
)
from .joins import (
    register_joiner as register_joiner,
)
from .load import (
    Blender as Blender,
    MixLike as MixLike,
    index_of_datasets as index_of_datasets,
    load_mix as load_mix,
    open_mix_index as open_mix_index,
)
from .metadataset import (
    metadataset_splits as metadataset_splits,
)
from .opener import (
    DatasetOpener as DatasetOpener,
    MixIndex as MixIndex,
    errors_at as errors_at,
)
from .paths import (
    resolve_path as resolve_path,
)
from .schedule import (
    WeightSchedule as WeightSchedule,
    parse_weight as parse_weight,
)
from .tree import (
    AuxRef as AuxRef,
    BlendNode as BlendNode,
    Concat as Concat,
    EpochizedNode as EpochizedNode,
    JoinRef as JoinRef,
    LeafRef as LeafRef,
    SubsetRange as SubsetRange,
    TreeLeaf as TreeLeaf,
    TreeNode as TreeNode,
    evaluate_subset as evaluate_subset,
    merge_subsets as merge_subsets,
)
