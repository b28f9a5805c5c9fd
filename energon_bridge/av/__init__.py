"""Video and sound: clips, frames and metadata, decoded on demand by PyAV.

`decoder` has the public `AVDecoder`, reads metadata and chooses clips; `media` opens a file, `streams` decodes it.
"""

from energon_bridge.av.decoder import AV_EXTENSIONS, AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_bridge.av.media import AVData

__all__ = ["AV_EXTENSIONS", "AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"]
