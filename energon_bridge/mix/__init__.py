"""Mixes: from a metadataset file, a dict or a `Blender` to a tree of leaves with weights.

`load_mix` reads whatever names a mix and gives its leaves; `metadataset` reads the files, `blender` the Python form,
`tree` has the nodes, `flatten` their effective weights, `subset` and `schedule` the ranges and the weights that change,
`joiners` finds what makes one sample of several, `describe` prints. Pure description: only YAML files are read,
datasets are opened by later layers.
"""

from __future__ import annotations

from energon_bridge.mix.blender import Blender
from energon_bridge.mix.describe import describe
from energon_bridge.mix.flatten import Mix, MixLeaf, MixMode, flatten
from energon_bridge.mix.joiners import register_joiner, resolve_joiner
from energon_bridge.mix.load import MixSource, load_mix, load_tree
from energon_bridge.mix.metadataset import metadataset_splits
from energon_bridge.mix.paths import resolve_path
from energon_bridge.mix.schedule import WeightSchedule, parse_weight
from energon_bridge.mix.subset import SubsetRange, evaluate_subset, merge_subsets
from energon_bridge.mix.tree import (
    AuxRef,
    Blend,
    Concat,
    EpochizedBlend,
    JoinEntry,
    Joiner,
    JoinRef,
    Leaf,
    LeafRef,
    Node,
    combine_multipliers,
    data_identity,
)

__all__ = [
    "AuxRef",
    "Blend",
    "Blender",
    "Concat",
    "EpochizedBlend",
    "JoinEntry",
    "JoinRef",
    "Joiner",
    "Leaf",
    "LeafRef",
    "Mix",
    "MixLeaf",
    "MixMode",
    "MixSource",
    "Node",
    "SubsetRange",
    "WeightSchedule",
    "combine_multipliers",
    "data_identity",
    "describe",
    "evaluate_subset",
    "flatten",
    "load_mix",
    "load_tree",
    "merge_subsets",
    "metadataset_splits",
    "parse_weight",
    "register_joiner",
    "resolve_joiner",
    "resolve_path",
]
