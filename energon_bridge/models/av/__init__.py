"""Video and sound: clips, frames and metadata, decoded on demand by PyAV.

It imports the core only. Begin with `av_decoder`, which has the public `AVDecoder` and turns ranges into frames and
samples. `media_file` opens a file and chooses its streams; `ends` says whether a file is cut off, by its headers;
`metadata` gives lengths and rates without decoding. `headers` decides whether packets tell the frames of a video: if
so, `streams` seeks in it by packets, else `whole` decodes it from its beginning. `sound` decodes sound.
"""

from energon_bridge.models.av.av_decoder import AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_bridge.models.av.media_file import AVData

__all__ = ["AVData", "AVDecoder", "get_clips_uniform", "get_single_frames_uniform"]
