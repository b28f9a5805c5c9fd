"""Video and sound: clips, frames and metadata, decoded on demand by PyAV.

`decoder` has the public `AVDecoder` and reads metadata; `media` opens a file and finds its streams, `packets` walks its
video packets, `video` and `audio` decode frames and samples; `clips` chooses clips.
"""

from energon_bridge.av.decoder import AV_EXTENSIONS, AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_bridge.av.media import AVData

__all__ = ["AV_EXTENSIONS", "AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"]
