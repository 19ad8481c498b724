"""Where models come from and go to: folders and names of the Hugging Face Hub, read without running what lies there.

A model is ``config.json`` beside ``model.safetensors``, or beside shards that ``model.safetensors.index.json`` names.
Pickled weights are never opened here.
"""

from replayssm.hub.folders import CONFIG, Folder, find_folder, read_config, read_json
from replayssm.hub.progress import Progress
from replayssm.hub.weights import INDEX, PICKLES, WEIGHTS, Weights
from replayssm.hub.writing import MTP, SHARD_BYTES, UNUSED, Shards, write_folder, write_weights

__all__ = [
    "CONFIG",
    "INDEX",
    "MTP",
    "PICKLES",
    "SHARD_BYTES",
    "UNUSED",
    "WEIGHTS",
    "Folder",
    "Progress",
    "Shards",
    "Weights",
    "find_folder",
    "read_config",
    "read_json",
    "write_folder",
    "write_weights",
]
