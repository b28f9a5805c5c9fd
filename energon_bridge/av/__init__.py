"""Videos and sound: clips, frames, segments and metadata, decoded when they are asked for, by PyAV.

`decoder` has the public `AVDecoder`; `media` opens a file and finds its streams, `packets` walks through its video, and
`video` and `audio` make frames and samples of what is found; `clips` chooses clips, `metadata` says what a file is.
"""

from energon_bridge.av.clips import get_clips_uniform, get_single_frames_uniform
from energon_bridge.av.decoder import AV_EXTENSIONS, AVDecoder
from energon_bridge.av.media import AVData

__all__ = ["AV_EXTENSIONS", "AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"]
